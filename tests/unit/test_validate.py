"""What bad input gets: INVALID_ARGUMENT naming field and limit, before any work (section A)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings, strategies as st
from legato.capacity import blocks_needed, max_tokens_that_fit
from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2 as pb
from legato_router.validate import check_prompt, validate
from legato_router.validated import (
    ChatPrompt,
    IdsPrompt,
    Message,
    ModelLimits,
    Objective,
    PreparedRequest,
    RequestClass,
    Resume,
    TextPrompt,
)

V, LEN = 1000, 64
MODEL = ModelLimits(
    vocab_size=V, max_model_len=LEN, block_size=16, num_blocks=64, eos_token_ids=(2, 3)
)


def request(**fields: object) -> pb.GenerateRequest:
    """A good request of three ids, altered."""
    if not {"text", "chat", "token_ids"} & fields.keys():
        fields["token_ids"] = pb.TokenIds(ids=[1, 2, 3])
    return pb.GenerateRequest(**fields)  # type: ignore[arg-type]


def sampling(**fields: object) -> pb.GenerateRequest:
    return request(sampling=pb.Sampling(**fields))  # type: ignore[arg-type]


def stop(**fields: object) -> pb.GenerateRequest:
    return request(stop=pb.Stop(**fields))  # type: ignore[arg-type]


def resume(*choices: pb.ChoiceTokens, token: bytes = b"t", n: int = 2) -> pb.GenerateRequest:
    return request(n=n, resume=pb.Resume(resume_token=token, choices=choices))


def prepare(message: pb.GenerateRequest, model: ModelLimits = MODEL) -> PreparedRequest:
    """Both steps, for a prompt of ids."""
    checked = validate(message, model)
    assert isinstance(checked.prompt, IdsPrompt)
    return check_prompt(checked, checked.prompt.ids, model)


def refusal(act: Callable[[], object]) -> LegatoError:
    with pytest.raises(LegatoError) as caught:
        act()
    return caught.value


def prompt_of(length: int, **fields: object) -> pb.GenerateRequest:
    return request(token_ids=pb.TokenIds(ids=[7] * length), **fields)


def bias(token_id: int, value: float) -> pb.LogitBias:
    return pb.LogitBias(token_id=token_id, bias=value)


def test_a_plain_request_gets_the_contracts_defaults() -> None:
    checked = validate(request(model="m", request_id="r", session="s", cache_salt="c"), MODEL)
    assert (checked.model, checked.request_id, checked.session, checked.cache_salt) == tuple("mrsc")
    assert checked.prompt == IdsPrompt((1, 2, 3))
    assert (checked.n, checked.max_tokens, checked.logprobs, checked.prompt_logprobs) == (
        1,
        None,
        None,
        None,
    )
    assert checked.sampling.temperature == 0
    assert checked.sampling.top_p == checked.sampling.repetition_penalty == 1
    assert checked.sampling.seed is None
    assert checked.request_class is RequestClass.STANDARD
    assert checked.objective == Objective()
    assert checked.initial_credit is None
    assert checked.resume is None


def test_what_is_asked_is_passed_on() -> None:
    checked = validate(
        request(
            max_tokens=9,
            n=2,
            logprobs=0,
            prompt_logprobs=20,
            request_class=pb.REQUEST_CLASS_BATCH,
            objective=pb.Objective(ttft_s=0.5, deadline_s=9),
            initial_credit=0,
            sampling=pb.Sampling(
                temperature=0.5,
                top_k=7,
                seed=0,
                logit_bias=[bias(4, -100), bias(3, 1), bias(3, 2)],
                bad_token_ids=[9, 8, 9],
            ),
            stop=pb.Stop(strings=["a", "b"], token_ids=[5, 4], min_tokens=3, include_string=True),
        ),
        MODEL,
    )
    assert (checked.max_tokens, checked.n, checked.initial_credit) == (9, 2, 0)
    assert (checked.logprobs, checked.prompt_logprobs) == (0, 20)
    assert checked.request_class is RequestClass.BATCH
    assert checked.objective == Objective(0.5, None, 9)
    assert (checked.sampling.temperature, checked.sampling.top_k, checked.sampling.seed) == (
        0.5,
        7,
        0,
    )
    assert checked.sampling.logit_bias == ((3, 3.0), (4, -100.0))
    assert checked.sampling.bad_token_ids == (8, 9)
    assert checked.stop.strings == ("a", "b")
    assert checked.stop.token_ids == (4, 5)
    assert (checked.stop.min_tokens, checked.stop.include_string) == (3, True)


BAD = {
    "b001 no ids": (request(token_ids=pb.TokenIds()), "token_ids"),
    "b001 no text": (request(text=""), "text"),
    "b001 no messages": (request(chat=pb.Chat()), "chat.messages"),
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "b002 id = V": (request(token_ids=pb.TokenIds(ids=[1, V])), "token_ids"),
    "b002 id = 2**32-1": (request(token_ids=pb.TokenIds(ids=[2**32 - 1, 1])), "token_ids"),
    "b002 stop id": (stop(token_ids=[V]), "stop.token_ids"),
    "b002 allowed id": (sampling(allowed_token_ids=[V]), "sampling.allowed_token_ids"),
    "b002 bad id": (sampling(bad_token_ids=[V]), "sampling.bad_token_ids"),
    "b002 resumed id": (resume(pb.ChoiceTokens(choice=0, ids=[V])), "resume.choices"),
    "b005 key = V": (sampling(logit_bias=[bias(V, 1)]), "sampling.logit_bias"),
    "b005 100,000 entries": (sampling(logit_bias=[bias(1, 0)] * 100_000), "sampling.logit_bias"),
    "b005 1025 entries": (sampling(logit_bias=[bias(1, 0)] * 1025), "sampling.logit_bias"),
    "b005 large": (sampling(logit_bias=[bias(1, 100.5)]), "sampling.logit_bias"),
    "b005 sum": (sampling(logit_bias=[bias(1, 80), bias(1, 80)]), "sampling.logit_bias"),
    "b007 logprobs 21": (request(logprobs=21), "logprobs"),
    "b007 logprobs 10**9": (request(logprobs=10**9), "logprobs"),
    "b007 prompt_logprobs 21": (request(prompt_logprobs=21), "prompt_logprobs"),
    "b008 n 0": (request(n=0), "n"),
    "b008 n 17": (request(n=17), "n"),
    "b008 n 5,000,000": (request(n=5_000_000), "n"),
    "b010 long request_id": (request(request_id="x" * 129), "request_id"),
    "b010 1 MB request_id": (request(request_id="x" * 10**6), "request_id"),
    "b010 bytes count": (request(request_id="é" * 65), "request_id"),
    "long session": (request(session="s" * 257), "session"),
    "long cache_salt": (request(cache_salt="s" * 257), "cache_salt"),
    "max_tokens 0": (request(max_tokens=0), "max_tokens"),
    "max_tokens of all": (request(max_tokens=LEN), "max_tokens"),
    "max_tokens 2**32-1": (request(max_tokens=2**32 - 1), "max_tokens"),
    "17 stops": (stop(strings=["x"] * 17), "stop.strings"),
    "empty stop": (stop(strings=["x", ""]), "stop.strings"),
    "long stop": (stop(strings=["é" * 129]), "stop.strings"),
    "65 stop ids": (stop(token_ids=[1] * 65), "stop.token_ids"),
    "min over max": (request(max_tokens=5, stop=pb.Stop(min_tokens=6)), "stop.min_tokens"),
    "min over model": (stop(min_tokens=LEN), "stop.min_tokens"),
    "stops without text": (request(skip_text=True, stop=pb.Stop(strings=["a"])), "stop.strings"),
    "1025 allowed": (sampling(allowed_token_ids=[1] * 1025), "sampling.allowed_token_ids"),
    "1025 bad": (sampling(bad_token_ids=[1] * 1025), "sampling.bad_token_ids"),
    "temperature 10.1": (sampling(temperature=10.1), "sampling.temperature"),
    "temperature -0.1": (sampling(temperature=-0.1), "sampling.temperature"),
    "top_p 0": (sampling(top_p=0), "sampling.top_p"),
    "top_p 1.1": (sampling(top_p=1.1), "sampling.top_p"),
    "min_p -0.1": (sampling(min_p=-0.1), "sampling.min_p"),
    "min_p 1.1": (sampling(min_p=1.1), "sampling.min_p"),
    "repetition 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    "repetition 1e-38": (sampling(repetition_penalty=1e-38), "sampling.repetition_penalty"),
    "repetition 11": (sampling(repetition_penalty=11), "sampling.repetition_penalty"),
    "presence 2.1": (sampling(presence_penalty=2.1), "sampling.presence_penalty"),
    "frequency -2.1": (sampling(frequency_penalty=-2.1), "sampling.frequency_penalty"),
    "class 7": (request(request_class=7), "request_class"),
    "ttft 0": (request(objective=pb.Objective(ttft_s=0)), "objective.ttft_s"),
    "itl -1": (request(objective=pb.Objective(itl_s=-1)), "objective.itl_s"),
    "role": (
        request(chat=pb.Chat(messages=[pb.ChatMessage(role="root", content="x")])),
        "chat.messages.role",
    ),
    "4097 messages": (
        request(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 4097)),
        "chat.messages",
    ),
    "b083 text": (request(text="x" * (16 * LEN + 1)), "text"),
    "b083 text, bytes count": (request(text="é" * (8 * LEN + 1)), "text"),
    "b083 chat": (
        request(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 600)] * 2)),
        "chat",
    ),
    "no resume token": (resume(token=b""), "resume.resume_token"),
    "huge resume token": (resume(token=b"x" * 1025), "resume.resume_token"),
    "resumed choice 2 of 2": (resume(pb.ChoiceTokens(choice=2)), "resume.choices"),
    "resumed twice": (
        resume(pb.ChoiceTokens(choice=1), pb.ChoiceTokens(choice=1)),
        "resume.choices",
    ),
    "resumed too long": (resume(pb.ChoiceTokens(ids=[1] * LEN)), "resume.choices"),
}


@pytest.mark.parametrize(("message", "field"), BAD.values(), ids=BAD.keys())
def test_bad_fields_are_named(message: pb.GenerateRequest, field: str) -> None:
    error = refusal(lambda: validate(message, MODEL))
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, field)
    assert error.message


GOOD = [
    request(max_tokens=LEN - 3),
    request(n=16),
    request(logprobs=20),
    request(request_id="é" * 64),
    request(session="s" * 256, cache_salt="s" * 256),
    stop(strings=["é" * 128] * 16),
    stop(token_ids=[V - 1] * 64),
    request(max_tokens=5, stop=pb.Stop(min_tokens=5)),
    sampling(temperature=10, top_p=1, min_p=1, repetition_penalty=10),
    sampling(presence_penalty=-2, frequency_penalty=2, min_p=0, top_p=1e-6),
    sampling(logit_bias=[bias(i % V, 100 * (-1) ** i) for i in range(V)]),
    sampling(allowed_token_ids=[V - 1], bad_token_ids=[0]),
    sampling(seed=2**64 - 1),
    request(objective=pb.Objective(ttft_s=1e-9, itl_s=1e9, deadline_s=1)),
    request(token_ids=pb.TokenIds(ids=[V - 1, 0])),
]


@pytest.mark.parametrize("message", GOOD, ids=range(len(GOOD)))
def test_values_at_their_limits_are_taken(message: pb.GenerateRequest) -> None:
    prepare(message)


def float_fields() -> list[tuple[str, str]]:
    """Every floating-point field of a request, so that a new one is covered with no edit here."""
    kinds = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
    return [
        (parent.name, field.name)
        for parent in pb.GenerateRequest.DESCRIPTOR.fields
        if parent.message_type is not None
        for field in parent.message_type.fields
        if field.type in kinds
    ]


def test_float_fields_are_found() -> None:
    assert ("sampling", "temperature") in float_fields()
    assert ("objective", "deadline_s") in float_fields()
    assert len(float_fields()) == 9


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("parent", "name"), float_fields())
def test_b004_no_float_may_be_other_than_finite(parent: str, name: str, value: float) -> None:
    message = request()
    setattr(getattr(message, parent), name, value)
    error = refusal(lambda: validate(message, MODEL))
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, f"{parent}.{name}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_b004_nor_a_logit_bias(value: float) -> None:
    error = refusal(lambda: validate(sampling(logit_bias=[bias(1, 0), bias(2, value)]), MODEL))
    assert error.field == "sampling.logit_bias"


def test_b040_top_k_beyond_the_vocabulary_means_all() -> None:
    for top_k, expected in ((0, 0), (1, 1), (V - 1, V - 1), (V, 0), (10**7, 0)):
        assert validate(sampling(top_k=top_k), MODEL).sampling.top_k == expected


def test_b007_logprobs_of_a_tiny_vocabulary_are_clamped_to_it() -> None:
    tiny = ModelLimits(vocab_size=5, max_model_len=LEN, block_size=16, num_blocks=64)
    checked = validate(request(logprobs=20, prompt_logprobs=20), tiny)
    assert (checked.logprobs, checked.prompt_logprobs) == (5, 5)


def test_b007_prompt_logprobs_must_fit_one_frame() -> None:
    """The bound holds against what protobuf makes of the largest values."""
    model = ModelLimits(vocab_size=V, max_model_len=1 << 17, block_size=16, num_blocks=1 << 14)
    error = refusal(lambda: prepare(prompt_of(20_000, prompt_logprobs=20), model))
    assert error.field == "prompt_logprobs"
    num_prompt = 15_728
    prepare(prompt_of(num_prompt, prompt_logprobs=20), model)
    entry = pb.TokenLogprobs(
        logprob=-1.5, rank=2**32 - 1, top_ids=[2**32 - 1] * 20, top_logprobs=[-1.5] * 20
    )
    delta = pb.Delta(prompt_logprobs=[entry] * (num_prompt - 1))
    assert delta.ByteSize() <= 3 << 20
    prepare(prompt_of(100_000, prompt_logprobs=0), model)


def test_prompt_lengths_around_the_models() -> None:
    prepared = prepare(prompt_of(LEN - 1, max_tokens=1))
    assert (len(prepared.prompt_ids), prepared.max_tokens) == (LEN - 1, 1)
    assert prepare(prompt_of(LEN - 1)).max_tokens == 1
    for length in (LEN, LEN + 1, 100 * LEN):
        error = refusal(lambda n=length: validate(prompt_of(n, max_tokens=1), MODEL))  # type: ignore[misc]
        assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "token_ids")
        assert error.metadata == {"limit": str(LEN - 1), "observed": str(length)}


def test_max_tokens_beyond_the_rest_is_refused_with_the_numbers() -> None:
    assert prepare(prompt_of(60, max_tokens=4)).max_tokens == 4
    error = refusal(lambda: prepare(prompt_of(60, max_tokens=5)))
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "max_tokens")
    assert error.metadata == {"limit": "4", "observed": "5"}
    assert "60" in error.message and str(LEN) in error.message


def test_unset_max_tokens_is_the_rest() -> None:
    assert prepare(prompt_of(10)).max_tokens == LEN - 10


def test_prompts_of_text_and_chat_are_checked_when_their_ids_are_known() -> None:
    text = validate(request(text="hello"), MODEL)
    chat = validate(
        request(
            chat=pb.Chat(
                messages=[pb.ChatMessage(role="user", content="hi")], skip_generation_prompt=True
            )
        ),
        MODEL,
    )
    assert text.prompt == TextPrompt("hello")
    assert chat.prompt == ChatPrompt((Message("user", "hi"),), skip_generation_prompt=True)
    for checked, field in ((text, "text"), (chat, "chat")):
        assert check_prompt(checked, [1, 2], MODEL).prompt_ids == (1, 2)
        for ids in ([], [1] * LEN, [1, V]):  # B001; too long; B002: a tokenizer knows more ids
            error = refusal(lambda i=ids, c=checked: check_prompt(c, i, MODEL))  # type: ignore[misc]
            assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (sampling(allowed_token_ids=[4, 5], bad_token_ids=[5, 4]), "sampling.allowed_token_ids"),
        (
            request(
                sampling=pb.Sampling(allowed_token_ids=[2, 3, 9]),
                stop=pb.Stop(token_ids=[9], min_tokens=1),
            ),
            "sampling.allowed_token_ids",
        ),
    ],
)
def test_something_must_be_left_to_generate(message: pb.GenerateRequest, field: str) -> None:
    assert refusal(lambda: validate(message, MODEL)).field == field


def test_something_is_left() -> None:
    validate(sampling(allowed_token_ids=[4, 5], bad_token_ids=[5]), MODEL)
    # Without min_tokens an answer may end at once; with ignore_eos those ids are like any other.
    validate(sampling(allowed_token_ids=[2]), MODEL)
    validate(
        request(
            sampling=pb.Sampling(allowed_token_ids=[2]), stop=pb.Stop(min_tokens=1, ignore_eos=True)
        ),
        MODEL,
    )
    tiny = ModelLimits(
        vocab_size=5, max_model_len=LEN, block_size=16, num_blocks=9, eos_token_ids=(4,)
    )
    validate(sampling(bad_token_ids=[0, 1, 2, 3]), tiny)
    error = refusal(lambda: validate(sampling(bad_token_ids=[0, 1, 2, 3, 4]), tiny))
    assert error.field == "sampling.bad_token_ids"
    ending = request(sampling=pb.Sampling(bad_token_ids=[0, 1, 2, 3]), stop=pb.Stop(min_tokens=1))
    assert refusal(lambda: validate(ending, tiny)).field == "sampling.bad_token_ids"


def test_resumed_ids_are_laid_out_by_choice() -> None:
    checked = validate(resume(pb.ChoiceTokens(choice=1, ids=[5, 6]), token=b"abc", n=3), MODEL)
    assert checked.resume == Resume(b"abc", ((), (5, 6), ()))
    long = resume(pb.ChoiceTokens(choice=1, ids=[5] * 6))
    long.max_tokens = 5
    assert refusal(lambda: prepare(long)).field == "resume.choices"


# KV capacity -------------------------------------------------------------------------------------


def test_b014_what_can_never_fit_is_refused_with_the_numbers() -> None:
    """A pool of 8 blocks of 16; 129 tokens would wait for ever."""
    model = ModelLimits(vocab_size=V, max_model_len=4096, block_size=16, num_blocks=8)
    assert prepare(prompt_of(128, max_tokens=1), model).blocks_needed == 8
    for message in (prompt_of(129, max_tokens=1), prompt_of(129), prompt_of(128, max_tokens=2)):
        error = refusal(lambda m=message: prepare(m, model))  # type: ignore[misc]
        assert (error.reason, error.retry_after_s) == (Reason.NEVER_FITS, None)
        assert error.metadata == {"limit": "8", "observed": "9"}
    assert prepare(prompt_of(5), model).blocks_needed == 8


def test_unset_max_tokens_is_lowered_to_what_fits() -> None:
    model = ModelLimits(vocab_size=V, max_model_len=4096, block_size=16, num_blocks=8)
    assert prepare(prompt_of(100), model).max_tokens == 29
    assert prepare(prompt_of(128), model).max_tokens == 1
    # Three continuations share 6 full blocks of the prompt: no room for three more and three.
    error = refusal(lambda: prepare(prompt_of(100, n=3), model))
    assert (error.reason, error.metadata["observed"]) == (Reason.NEVER_FITS, "9")
    assert prepare(prompt_of(96, n=3), model).max_tokens == 1
    assert prepare(prompt_of(100, n=2), model).max_tokens == 13


def test_min_tokens_beyond_what_fits_is_refused() -> None:
    model = ModelLimits(vocab_size=V, max_model_len=4096, block_size=16, num_blocks=8)
    assert prepare(prompt_of(100, stop=pb.Stop(min_tokens=29)), model).max_tokens == 29
    error = refusal(lambda: prepare(prompt_of(100, stop=pb.Stop(min_tokens=30)), model))
    assert error.field == "stop.min_tokens"


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 5), st.sampled_from([1, 4, 16]))
@settings(deadline=None)
def test_blocks_needed_counts_the_blocks_of_n_sequences(
    prompt_len: int, max_tokens: int, n: int, block_size: int
) -> None:
    """By laying the sequences out: (block index) for shared ones, (sequence, index) for others."""
    blocks: set[tuple[int, ...]] = set()
    for sequence in range(n):
        for position in range(prompt_len + max_tokens - 1):
            index = position // block_size
            is_shared = (index + 1) * block_size <= prompt_len
            blocks.add((index,) if is_shared else (sequence, index))
    assert blocks_needed(prompt_len, max_tokens, n, block_size) == len(blocks)


@given(st.integers(1, 70), st.integers(1, 5), st.sampled_from([1, 4, 16]), st.integers(1, 40))
@settings(deadline=None)
def test_max_tokens_that_fit_is_the_largest(
    prompt_len: int, n: int, block_size: int, num_blocks: int
) -> None:
    largest = max_tokens_that_fit(prompt_len, n, block_size, num_blocks)
    fitting = [
        tokens
        for tokens in range(1, num_blocks * block_size + 2)
        if blocks_needed(prompt_len, tokens, n, block_size) <= num_blocks
    ]
    assert max(largest, 0) == max(fitting, default=0)
