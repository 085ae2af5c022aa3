"""The pure parts of the client: building requests, what was received, when to try again."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st
from legato.answer import FinishReason, Received
from legato.client import Client, Delta, LegatoError, Reason, Tls
from legato.request import _PLACES, GenerateFields, build_request
from legato.retry import Retries, RetryLimits
from legato.v1 import inference_pb2 as pb

from tests.fake_router import (
    BUSY,
    delta,
)

# ---------------------------------------------------------------------------------------------
# Building requests.


def test_every_field_has_a_keyword_and_lands_in_its_place() -> None:
    assert _PLACES.keys() == GenerateFields.__annotations__.keys()
    request = build_request(
        None,
        {
            "chat": [{"role": "user", "content": "Hi"}],
            "skip_generation_prompt": True,
            "model": "m",
            "max_tokens": 0,
            "n": 2,
            "logprobs": 0,
            "prompt_logprobs": 3,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.25,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "presence_penalty": -1.0,
            "frequency_penalty": 2.0,
            "logit_bias": {7: -100.0},
            "allowed_token_ids": [1],
            "bad_token_ids": [2, 3],
            "seed": 2**64 - 1,
            "stop": "END",
            "stop_token_ids": (5, 6),
            "min_tokens": 8,
            "ignore_eos": True,
            "include_stop_string": True,
            "request_class": "batch",
            "ttft_s": 0.5,
            "itl_s": 0.25,
            "deadline_s": 9.0,
            "session": "s",
            "cache_salt": "c",
            "initial_credit": 0,
            "request_id": "r",
            "skip_text": True,
        },
    )
    assert request == pb.GenerateRequest(
        chat=pb.Chat(
            messages=[pb.ChatMessage(role="user", content="Hi")], skip_generation_prompt=True
        ),
        model="m",
        max_tokens=0,
        n=2,
        logprobs=0,
        prompt_logprobs=3,
        sampling=pb.Sampling(
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            logit_bias=[pb.LogitBias(token_id=7, bias=-100.0)],
            allowed_token_ids=[1],
            bad_token_ids=[2, 3],
            seed=2**64 - 1,
        ),
        stop=pb.Stop(
            strings=["END"],
            token_ids=[5, 6],
            min_tokens=8,
            ignore_eos=True,
            include_string=True,
        ),
        request_class=pb.REQUEST_CLASS_BATCH,
        objective=pb.Objective(ttft_s=0.5, itl_s=0.25, deadline_s=9.0),
        session="s",
        cache_salt="c",
        initial_credit=0,
        request_id="r",
        skip_text=True,
    )
    # The oneof and what only the client may set are all that has no keyword of its own.
    set_here = {field.name for field, _ in request.ListFields()}
    every = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    assert every - set_here == {"text", "token_ids", "resume"}


def test_an_unset_field_stays_unset_and_an_empty_prompt_is_a_prompt() -> None:
    assert build_request("", {"max_tokens": None}).WhichOneof("prompt") == "text"
    request = build_request(None, {"token_ids": [], "max_tokens": None})
    assert request == pb.GenerateRequest(token_ids=pb.TokenIds())
    assert request.WhichOneof("prompt") == "token_ids"
    assert not request.HasField("max_tokens") and not request.HasField("sampling")


@pytest.mark.parametrize(
    ("prompt", "fields", "place"),
    [
        (None, {"token_ids": [1, -1]}, "token_ids.ids"),
        (None, {"token_ids": [2**32]}, "token_ids.ids"),
        (None, {"token_ids": ["a"]}, "token_ids.ids"),
        (None, {"token_ids": 7}, "token_ids.ids"),
        (None, {"chat": [{"role": "user", "text": "Hi"}]}, "chat.messages"),
        (None, {"chat": [{"role": "user", "content": [{"type": "text"}]}]}, "chat.messages"),
        (None, {"chat": "Hi"}, "chat.messages"),
        ("\ud800", {}, "text"),
        (b"\xff", {}, "text"),
        ("a", {"max_tokens": -1}, "max_tokens"),
        ("a", {"max_tokens": 1.5}, "max_tokens"),
        ("a", {"temperature": "hot"}, "sampling.temperature"),
        ("a", {"seed": 2**64}, "sampling.seed"),
        ("a", {"bad_token_ids": [2**32]}, "sampling.bad_token_ids"),
        ("a", {"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ("a", {"logit_bias": [(1, 1.0)]}, "sampling.logit_bias"),
        ("a", {"stop": [1]}, "stop.strings"),
        ("a", {"stop_token_ids": [-5]}, "stop.token_ids"),
        ("a", {"request_class": "urgent"}, "request_class"),
        ("a", {"request_class": 3}, "request_class"),
        ("a", {"token_ids": [1]}, "prompt"),
        (None, {}, "prompt"),
        ("a", {"skip_generation_prompt": True}, "chat.skip_generation_prompt"),
    ],
)
async def test_what_a_field_cannot_hold_is_refused_by_its_name(
    prompt: str | None, fields: GenerateFields, place: str
) -> None:
    async with Client() as client:
        with pytest.raises(LegatoError) as caught:
            client.stream(prompt, **fields)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, place)
    assert caught.value.message


async def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        Client().stream("a", temprature=1.0)  # type: ignore[call-arg]


async def test_bad_options_are_refused_by_their_name() -> None:
    client = Client()
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: client.stream("a", timeout_s=0), "timeout_s"),
        (lambda: client.stream("a", timeout_s=math.nan), "timeout_s"),
        (lambda: client.stream("a", retry_for_s=-1), "retry_for_s"),
        (lambda: client.stream("a", retry_for_s=math.nan), "retry_for_s"),
        (lambda: client.stream("a", traceparent="a\nb"), "traceparent"),
        (lambda: client.stream("a", request_id="é"), "x-request-id"),
        (lambda: Client(max_resumes=-1), "max_resumes"),
        (lambda: Client("a:1,,b:2"), "address"),
        (lambda: Client(""), "address"),
        (lambda: Client(token="a b\r\n"), "authorization"),
        (lambda: Client(tenant="ö"), "x-legato-tenant"),
        (lambda: Tls(cert_pem=b"x"), "tls"),
        (lambda: Tls(key_pem=b"x"), "tls"),
    ]
    for call, field in refusals:
        with pytest.raises(LegatoError) as caught:
            call()
        assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, field)
    with pytest.raises(LegatoError, match="initial_credit"):
        await client.generate("a", initial_credit=3)


@pytest.mark.parametrize(
    ("address", "is_safe"),
    [
        ("localhost:7070", True),
        ("localhost", True),
        ("127.0.0.1:7070", True),
        ("127.8.9.1:7070", True),
        ("[::1]:7070", True),
        ("ipv4:127.0.0.1:7070", True),
        ("dns:///localhost:7070", True),
        ("unix:/run/legato.sock", True),
        ("10.0.0.1:7070", False),
        ("router:7070", False),
        ("dns:///router.prod:7070", False),
        ("localhost.evil.example:7070", False),
        ("dns://127.0.0.1/router:7070", False),
        ("localhost:7070,router:7070", False),
    ],
)
def test_a_token_never_leaves_this_machine_in_the_clear(address: str, is_safe: bool) -> None:
    Client(address, token="secret", tls=Tls())
    Client(address)
    if is_safe:
        Client(address, token="secret")
    else:
        with pytest.raises(LegatoError) as caught:
            Client(address, token="secret")
        assert caught.value.field == "token"
        assert "secret" not in str(caught.value)


# ---------------------------------------------------------------------------------------------
# What has been received: order, duplicates, gaps.


def accept(received: Received, *frames: pb.ServerFrame) -> list[Delta]:
    taken = [received.accept(frame.delta) for frame in frames]
    return [d for d in taken if d is not None]


def test_ids_already_held_are_dropped() -> None:
    received = Received(1)
    logprobs = [pb.TokenLogprobs(logprob=-i) for i in range(3)]
    deltas = accept(
        received,
        delta(0, [1, 2], "ab"),
        delta(0, [1, 2], "ab"),
        delta(1, [2], "b"),
        delta(1, [2, 3, 4], "cd", logprobs=logprobs),
        delta(4, [], "e", finish_reason=pb.FINISH_REASON_STOP),
        delta(2, [3, 4], "cd"),
        delta(4, [], "e", finish_reason=pb.FINISH_REASON_STOP),
    )
    assert [(d.start_index, d.ids, d.text) for d in deltas] == [
        (0, (1, 2), "ab"),
        (2, (3, 4), "cd"),
        (4, (), "e"),
    ]
    assert [entry.logprob for entry in deltas[1].logprobs] == [-1, -2]
    assert deltas[2].finish_reason is FinishReason.STOP
    assert received.num_tokens == 4


def test_an_end_that_repeats_held_ids_still_ends_the_choice() -> None:
    received = Received(1)
    end = delta(1, [2], "held back", finish_reason=pb.FINISH_REASON_LENGTH)
    deltas = accept(received, delta(0, [1, 2], "a"), end, end)
    assert [(d.ids, d.text, d.finish_reason) for d in deltas] == [
        ((1, 2), "a", None),
        ((), "held back", FinishReason.LENGTH),
    ]


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ([delta(0, [1]), delta(2, [3])], "gap in choice 0: 1 ids held, next starts at 2"),
        ([delta(1, [1])], "gap"),
        ([delta(0, [1, 2]), delta(1, [9, 3])], "other ids"),
        ([delta(0, [1], choice=1)], "choice 1 of 1"),
        ([delta(0, [1], finish_reason=pb.FINISH_REASON_STOP), delta(1, [2])], "after the end"),
    ],
)
def test_a_broken_order_is_an_internal_error(frames: list[pb.ServerFrame], what: str) -> None:
    with pytest.raises(LegatoError, match=what) as caught:
        accept(Received(1), *frames)
    assert caught.value.reason is Reason.INTERNAL


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(0, 6))))
def test_any_repetition_gives_each_id_once(sent: list[tuple[int, int, int]]) -> None:
    """Frames (choice, how far back they start, how many ids) that never leave a gap."""
    received = Received(2)
    answers = {0: [100 + i for i in range(200)], 1: [500 + i for i in range(200)]}
    got: dict[int, list[int]] = {0: [], 1: []}
    for choice, back, length in sent:
        start = max(0, len(got[choice]) - back)
        frame = delta(start, answers[choice][start : start + length], choice=choice)
        for taken in accept(received, frame):
            assert taken.start_index == len(got[choice])
            got[choice] += taken.ids
    assert all(got[choice] == answers[choice][: len(got[choice])] for choice in got)
    assert received.num_tokens == sum(map(len, got.values()))
    held = {c.choice: list(c.ids) for c in received.resume(b"t").choices}
    assert held == {choice: ids for choice, ids in got.items() if ids}


# ---------------------------------------------------------------------------------------------
# When to try again.


def pauses(limits: RetryLimits, error: LegatoError, *, lost: bool, continuing: bool) -> list[float]:
    """Pauses until the error is raised, when each try fails at once."""
    retries = Retries(limits, start=100.0, random=lambda: 1.0)
    now = 100.0
    found: list[float] = []
    while len(found) < 50:
        pause_s = retries.pause_s(error, lost=lost, continuing=continuing, now=now)
        if pause_s is None:
            break
        found.append(pause_s)
        now += pause_s
    return [round(p, 6) for p in found]


@pytest.mark.parametrize(
    ("limits", "error", "lost", "continuing", "expected"),
    [
        (RetryLimits(), LegatoError(Reason.NO_WORKER, ""), True, False, [0.2, 0.4, 0.8]),
        (RetryLimits(), LegatoError(Reason.INTERNAL, ""), True, True, [0.2, 0.4, 0.8]),
        (RetryLimits(max_resumes=0), LegatoError(Reason.INTERNAL, ""), True, True, []),
        (RetryLimits(timeout_s=0.5), LegatoError(Reason.INTERNAL, ""), True, True, [0.2]),
        # Typed refusals at the door: only as the caller asked.
        (RetryLimits(), BUSY, False, False, []),
        (RetryLimits(retry_for_s=1.0), BUSY, False, False, [0.25, 0.45]),
        (RetryLimits(retry_for_s=9, timeout_s=0.5), BUSY, False, False, [0.25]),
        (RetryLimits(), LegatoError(Reason.NO_WORKER, ""), False, False, []),
        # ... but an answer under way is worth its resumes.
        (RetryLimits(), BUSY, False, True, [0.25, 0.45, 0.85]),
        (RetryLimits(), LegatoError(Reason.NO_WORKER, ""), False, True, [0.2, 0.4, 0.8]),
        # A draining router sends its callers on.
        (RetryLimits(), LegatoError(Reason.DRAINING, ""), False, False, [0.2, 0.4, 0.8]),
        # What a retry cannot help.
        (RetryLimits(retry_for_s=9), LegatoError(Reason.WORKER_LOST, ""), False, True, []),
        (RetryLimits(retry_for_s=9), LegatoError(Reason.RESUME_INVALID, ""), False, True, []),
        (RetryLimits(retry_for_s=9), LegatoError(Reason.INTERNAL, ""), False, True, []),
        (RetryLimits(retry_for_s=9), LegatoError(Reason.INVALID_ARGUMENT, ""), False, False, []),
    ],
)
def test_what_is_tried_again(
    limits: RetryLimits, error: LegatoError, lost: bool, continuing: bool, expected: list[float]
) -> None:
    assert pauses(limits, error, lost=lost, continuing=continuing) == expected


def test_pauses_are_jittered_and_bounded() -> None:
    limits = RetryLimits(max_resumes=20)
    error = LegatoError(Reason.INTERNAL, "")
    low = Retries(limits, start=0.0, random=lambda: 0.0)
    high = Retries(limits, start=0.0, random=lambda: 1.0)
    for _ in range(20):
        a = low.pause_s(error, lost=True, continuing=True, now=0.0)
        b = high.pause_s(error, lost=True, continuing=True, now=0.0)
        assert a is not None and b is not None and a == b / 2
    assert b == 5.0
