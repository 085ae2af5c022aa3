"""Chat templates: what transformers renders, from every place where models keep them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from legato.errors import LegatoError, Reason
from legato_deploy.store import ModelStore, default_root
from legato_router.chat import ChatTemplate
from legato_router.tokenizer import ModelTokenizer
from legato_router.validated import ChatPrompt, Message
from transformers import AutoTokenizer

from tests.small_tokenizers import ids_of, llama_bpe

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, object] = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    "pad_token": None,
    "add_bos_token": True,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
TALK = ChatPrompt((Message("system", "Be brief."), Message("user", "Hi <b> & 你")))
RENDERED = (
    "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b> & 你<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def model_dir(path: Path, config: dict[str, object], template_file: str | None = None) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template_file is not None:
        (path / "chat_template.jinja").write_text(template_file)
    llama_bpe().save(str(path / "tokenizer.json"))
    return path


def load(path: Path) -> ChatTemplate:
    template = ChatTemplate.load(path)
    assert template is not None
    return template


def render_refusal(template: ChatTemplate, prompt: ChatPrompt = TALK) -> LegatoError:
    with pytest.raises(LegatoError) as caught:
        template.render(prompt)
    return caught.value


def test_a_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    folder = model_dir(tmp_path, {**CONFIG, "chat_template": "old"}, CHATML)
    assert load(folder).render(TALK) == RENDERED


@pytest.mark.parametrize(
    "entry",
    [
        CHATML,
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}],
    ],
)
def test_a_template_in_the_configuration(tmp_path: Path, entry: object) -> None:
    assert load(model_dir(tmp_path, {**CONFIG, "chat_template": entry})).render(TALK) == RENDERED


def test_special_tokens_of_the_older_file(tmp_path: Path) -> None:
    folder = model_dir(tmp_path, {"eos_token": "<|im_end|>"}, CHATML)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    assert load(folder).render(TALK) == RENDERED


def test_a_model_without_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(model_dir(tmp_path, CONFIG)) is None
    named = {**CONFIG, "chat_template": [{"name": "rag", "template": "x"}]}
    assert ChatTemplate.load(model_dir(tmp_path, named)) is None


def test_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    """Rendered and encoded: special tokens from the template, and none added again."""
    folder = model_dir(tmp_path, CONFIG, CHATML)
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    messages = [{"role": m.role, "content": m.content} for m in TALK.messages]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    tokenizer = ModelTokenizer.load(folder)
    ids = tokenizer.encode(load(folder).render(TALK), add_special_tokens=False)
    assert ids == expected
    assert ids.count(*ids_of(tokenizer.backend, "<s>")) == 1
    # Plain text gets what transformers adds by default, whatever the configuration says of it.
    assert tokenizer.encode("Hello") == theirs("Hello")["input_ids"]


def test_the_assistants_turn_is_left_out_on_request(tmp_path: Path) -> None:
    template = load(model_dir(tmp_path, CONFIG, CHATML))
    closed = ChatPrompt(TALK.messages, skip_generation_prompt=True)
    assert template.render(closed) == RENDERED.removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize("begun", ["Sure, the", "trailing space ", ""])
def test_a_partial_answer_is_left_open(tmp_path: Path, begun: str) -> None:
    template = load(model_dir(tmp_path, CONFIG, CHATML))
    messages = (*TALK.messages, Message("assistant", begun))
    rendered = template.render(ChatPrompt(messages, skip_generation_prompt=True))
    assert rendered == RENDERED + begun
    # Without the request, it is an earlier turn like any other.
    assert template.render(ChatPrompt(messages)).endswith(
        f"{begun}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages + 1 }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_what_a_template_refuses_is_the_callers_to_mend(source: str) -> None:
    error = render_refusal(ChatTemplate(source, {}))
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "chat")


def test_a_template_names_its_reason_in_few_words() -> None:
    error = render_refusal(ChatTemplate("{{ raise_exception('roles must alternate') }}", {}))
    assert "roles must alternate" in error.message
    quoting = ChatTemplate("{{ raise_exception(messages[0].content * 100000) }}", {})
    assert len(render_refusal(quoting).message) < 300


def test_a_broken_template_is_not_blamed_on_the_caller() -> None:
    error = render_refusal(ChatTemplate("{% for m in messages %}", {}))
    assert error.reason is Reason.INTERNAL


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_b112_a_template_cannot_leave_its_sandbox(source: str) -> None:
    assert render_refusal(ChatTemplate(source, {})).field == "chat"


def test_b112_a_models_configuration_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = {**CONFIG, "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    folder = model_dir(tmp_path, config, CHATML)
    assert load(folder).render(TALK) == RENDERED
    ModelTokenizer.load(folder).encode("x")
    assert not marker.exists()


@pytest.mark.model
def test_smollm2_chat_equals_transformers() -> None:
    path = Path(ModelStore(default_root()).get("smollm2-135m-instruct").path)
    theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer, template = ModelTokenizer.load(path), load(path)
    for prompt in (TALK, ChatPrompt((Message("user", "What is 12345 + 67890?"),))):
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert tokenizer.encode(template.render(prompt), add_special_tokens=False) == expected
