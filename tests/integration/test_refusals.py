"""What bad input gets at the router's door: a typed refusal that names the field, before anything
is spent on it, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.errors import LegatoError, Reason, from_rpc_error
from legato.v1 import inference_pb2 as pb, inference_pb2_grpc

from tests.bystanders import bystanders
from tests.local_fleet import fleet, until
from tests.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.timeout(60)

MAX_LEN = 4000
NUM_BLOCKS = 160
WORKER = {"max_model_len": MAX_LEN, "num_blocks": NUM_BLOCKS, "simulated_base_ms": 0.2}

Change = Callable[[pb.GenerateRequest], object]
Case = tuple[str, str, Change]


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        max_tokens=4,
        **fields,  # type: ignore[arg-type]
    )


async def refusal(
    stub: inference_pb2_grpc.InferenceStub, asked: pb.GenerateRequest
) -> tuple[grpc.StatusCode, LegatoError] | None:
    """How a streamed call is refused; None when it is answered."""
    call = stub.Generate(iter([pb.ClientFrame(request=asked)]), timeout=10)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), from_rpc_error(error)
    return None


def put(path: str, value: object) -> Change:
    """Sets the scalar field at ``path``."""

    def change(asked: pb.GenerateRequest) -> None:
        *parents, leaf = path.split(".")
        message: object = asked
        for parent in parents:
            message = getattr(message, parent)
        setattr(message, leaf, value)

    return change


def add(path: str, *values: object) -> Change:
    """Appends to the repeated field at ``path``."""

    def change(asked: pb.GenerateRequest) -> None:
        field: Any = asked
        for name in path.split("."):
            field = getattr(field, name)
        field.extend(values)

    return change


def both(*changes: Change) -> Change:
    def change(asked: pb.GenerateRequest) -> None:
        for each in changes:
            each(asked)

    return change


def cases() -> Iterator[Case]:
    """(fault or rule, field named by the refusal, what is wrong)."""
    yield "B001", "token_ids", lambda r: r.token_ids.ClearField("ids")
    yield "B001", "text", put("text", "")
    yield "B001", "prompt", lambda r: r.ClearField("prompt")
    yield "B001", "chat.messages", lambda r: r.chat.SetInParent()
    for bad_id in (VOCAB_SIZE, 2**31, 2**32 - 1):
        yield "B002", "token_ids", add("token_ids.ids", bad_id)
        yield "B002", "stop.token_ids", add("stop.token_ids", bad_id)
        for name in ("allowed_token_ids", "bad_token_ids"):
            yield "B002", f"sampling.{name}", add(f"sampling.{name}", bad_id)
    for value in (nan, inf, -inf):
        for field in (
            *("sampling.temperature", "sampling.top_p", "sampling.min_p"),
            *("sampling.repetition_penalty", "sampling.presence_penalty"),
            *("sampling.frequency_penalty", "objective.ttft_s", "objective.itl_s"),
            "objective.deadline_s",
        ):
            yield f"B004 {value}", field, put(field, value)
        bias = pb.LogitBias(token_id=1, bias=value)
        yield f"B004 {value}", "sampling.logit_bias", add("sampling.logit_bias", bias)
    for field, value in (
        *(("sampling.temperature", -0.1), ("sampling.temperature", 10.5)),
        *(("sampling.top_p", 0.0), ("sampling.top_p", 1.01), ("sampling.min_p", -0.01)),
        *(("sampling.repetition_penalty", 0.0), ("sampling.presence_penalty", 2.1)),
        *(("sampling.frequency_penalty", -2.1), ("objective.ttft_s", 0.0)),
        *(("objective.itl_s", -1.0), ("objective.deadline_s", 0.0)),
    ):
        yield f"range {value}", field, put(field, value)
    outside = pb.LogitBias(token_id=VOCAB_SIZE, bias=1)
    yield "B005", "sampling.logit_bias", add("sampling.logit_bias", outside)
    many = [pb.LogitBias(token_id=i % VOCAB_SIZE, bias=1) for i in range(100_000)]
    yield "B005 many", "sampling.logit_bias", add("sampling.logit_bias", *many)
    for number in (21, VOCAB_SIZE + 1, 10**9, 2**32 - 1):
        yield f"B007 {number}", "logprobs", put("logprobs", number)
        yield f"B007 {number}", "prompt_logprobs", put("prompt_logprobs", number)
    for number in (0, 17, 5_000_000):
        yield f"B008 {number}", "n", put("n", number)
    yield "max_tokens 0", "max_tokens", put("max_tokens", 0)
    yield "max_tokens", "max_tokens", put("max_tokens", MAX_LEN)
    yield "max_tokens", "max_tokens", put("max_tokens", 2**32 - 1)
    yield "room", "max_tokens", put("max_tokens", MAX_LEN - 2)
    yield "stop count", "stop.strings", add("stop.strings", *"abcdefghijklmnopq")
    yield "stop empty", "stop.strings", add("stop.strings", "")
    yield "stop size", "stop.strings", add("stop.strings", "é" * 129)
    yield "stop ids", "stop.token_ids", add("stop.token_ids", *range(65))
    yield "min_tokens", "stop.min_tokens", put("stop.min_tokens", 5)
    listed = add("sampling.bad_token_ids", *[1] * 1025)
    yield "ids listed", "sampling.bad_token_ids", listed
    nothing = both(add("sampling.allowed_token_ids", 7), add("sampling.bad_token_ids", 7))
    yield "nothing left", "sampling.allowed_token_ids", nothing
    yield "class", "request_class", put("request_class", 9)
    yield "session", "session", put("session", "s" * 257)
    yield "salt", "cache_salt", put("cache_salt", "s" * 257)
    yield "B010", "request_id", put("request_id", "r" * 129)
    yield "B010 huge", "request_id", put("request_id", "r" * (1 << 20))
    yield "chat", "chat", lambda r: r.chat.messages.add(role="user", content="hi")
    yield "role", "chat.messages.role", lambda r: r.chat.messages.add(role="root", content="hi")
    yield "prompt length", "token_ids", add("token_ids.ids", *[1] * MAX_LEN)
    yield "prompt length", "text", put("text", "ab " * MAX_LEN)


async def test_every_bad_field_is_refused_by_name_and_nobody_else_notices(model_dir: Path) -> None:
    """B001, B002, B004, B005, B007, B008, B010: streamed and unary, while two streams run."""
    wrong = []
    async with fleet(model_dir, worker=WORKER) as running, running.stub() as stub:
        async with bystanders(running):
            for rule, field, change in cases():
                asked = request()
                change(asked)
                got = await refusal(stub, asked)
                if got is None or (got[0], got[1].field) != (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    field,
                ):
                    wrong.append((rule, field, got))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateOnce(request(n=0))
        assert from_rpc_error(caught.value).field == "n"
        await running.until_idle()
    assert not wrong


async def test_a_refusal_tells_the_limit_and_what_was_sent(model_dir: Path) -> None:
    async with fleet(model_dir, worker=WORKER) as running, running.stub() as stub:
        got = await refusal(stub, request(n=99))
        assert got is not None
        assert got[1].reason is Reason.INVALID_ARGUMENT
        assert dict(got[1].metadata) == {"limit": "16", "observed": "99"}
        assert got[1].retry_after_s is None


async def test_a_refused_request_costs_no_step(model_dir: Path) -> None:
    """B002 and its like end at the door: the workers do not move."""
    async with fleet(model_dir, worker=WORKER) as running, running.stub() as stub:
        for _, _, change in cases():
            asked = request()
            change(asked)
            assert await refusal(stub, asked) is not None
        assert running.num_steps() == 0
        assert not running.held()


async def test_max_tokens_zero_is_not_unset(model_dir: Path) -> None:
    """0 is refused (above); unset means up to the model's limit; 1 gives one."""
    async with fleet(model_dir, worker=WORKER) as running, running.stub() as stub:
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1] * (MAX_LEN - 5)), stop=pb.Stop(ignore_eos=True)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # the pool is smaller than the model
            await stub.GenerateOnce(asked)
        assert from_rpc_error(caught.value).reason is Reason.NEVER_FITS
        del asked.token_ids.ids[100:]
        plan = await stub.Plan(asked)
        assert plan.admissible and plan.blocks_needed == NUM_BLOCKS
        asked.max_tokens = 1
        answer = await stub.GenerateOnce(asked)
        assert answer.admitted.max_tokens == 1 and len(answer.choices[0].ids) == 1
        assert answer.finished.reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("kind", ["token_ids", "text"])
async def test_prompt_at_the_limit(model_dir: Path, kind: str) -> None:
    """max_len - 1 leaves room for one token; max_len and max_len + 1 are refused by name."""
    async with fleet(model_dir, worker={"max_model_len": 64}) as running, running.stub() as stub:

        def of_length(length: int) -> pb.GenerateRequest:
            if kind == "text":
                return pb.GenerateRequest(text="~" * length)
            return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * length))

        answer = await stub.GenerateOnce(of_length(63))
        assert answer.admitted.prompt_tokens == 63
        assert len(answer.choices[0].ids) == answer.admitted.max_tokens == 1
        for length in (64, 65, 200):
            got = await refusal(stub, of_length(length))
            assert got is not None
            assert (got[0], got[1].field) == (grpc.StatusCode.INVALID_ARGUMENT, kind)
            assert dict(got[1].metadata) == {"limit": "63", "observed": str(length)}


async def test_top_k_beyond_the_vocabulary_means_all(model_dir: Path) -> None:
    """B040: the row is as if top_k were off."""
    async with fleet(model_dir) as running, running.client() as client:
        answers = [
            await client.generate(
                token_ids=[9], max_tokens=16, temperature=1.0, seed=3, top_k=top_k
            )
            for top_k in (0, VOCAB_SIZE, 10**7, 2**32 - 1)
        ]
        assert len({answer.ids for answer in answers}) == 1


async def test_what_never_fits_is_refused_at_once_with_the_numbers(model_dir: Path) -> None:
    """B014: not queued, not retried, and a short one behind it is served."""
    async with fleet(model_dir, worker=WORKER) as running, running.stub() as stub:
        big = request()
        big.token_ids.ids.extend([1] * 3000)
        got = await refusal(stub, big)
        assert got is not None
        code, error = got
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert error.reason is Reason.NEVER_FITS and error.retry_after_s is None
        assert dict(error.metadata) == {"limit": str(NUM_BLOCKS), "observed": "188"}
        assert str(NUM_BLOCKS) in error.message and "188" in error.message
        assert running.num_steps() == 0
        assert await refusal(stub, request()) is None


async def test_an_unknown_model_is_not_found(model_dir: Path) -> None:
    async with fleet(model_dir) as running, running.stub() as stub:
        for name in ("other", "../../etc/passwd", "tiny ", "x" * 100_000):
            got = await refusal(stub, request(model=name))
            assert got is not None
            assert got[0] is grpc.StatusCode.NOT_FOUND
            assert got[1].reason is Reason.MODEL_NOT_FOUND and len(got[1].message) < 500
        assert await refusal(stub, request(model="tiny")) is None


async def test_a_forged_resume_token_is_refused(model_dir: Path) -> None:
    async with fleet(model_dir) as running, running.stub() as stub:
        asked = request(resume=pb.Resume(resume_token=b"forged" * 20))
        got = await refusal(stub, asked)
        assert got is not None
        assert got[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert got[1].reason is Reason.RESUME_INVALID


async def test_frames_out_of_order_are_refused(model_dir: Path) -> None:
    """The first frame is the request; a call without one is refused, not waited for."""
    async with fleet(model_dir) as running, running.stub() as stub:
        empty: list[pb.ClientFrame] = []
        for frames in (
            [pb.ClientFrame(credit=pb.Credit(tokens=1)), pb.ClientFrame(request=request())],
            [pb.ClientFrame(cancel=pb.Cancel())],
            [pb.ClientFrame()],
            empty,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(iter(frames), timeout=5):
                    pass
            assert from_rpc_error(caught.value).field == "request", frames
        await running.until_idle()


async def test_unary_calls_refuse_what_they_cannot_answer(model_dir: Path) -> None:
    """B101: an answer too large for one message is refused before any work; credit is for
    streams."""
    async with fleet(model_dir, worker={"num_blocks": 9000}) as running, running.stub() as stub:
        cases = {
            "initial_credit": request(initial_credit=5),
            "max_tokens": pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[1]), max_tokens=8000, n=16, logprobs=20
            ),
        }
        for field, asked in cases.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GenerateOnce(asked, timeout=5)
            error = from_rpc_error(caught.value)
            assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, field)
        assert running.num_steps() == 0


async def test_request_ids_collide_without_harm(model_dir: Path) -> None:
    """B010: an id of the client is echoed and is never a key."""
    async with fleet(model_dir) as running, running.client() as client:
        other = running.client(tenant="another")
        fields: dict[str, Any] = {"max_tokens": 30, "request_id": "same", "ignore_eos": True}
        solo = [await client.generate(token_ids=[i], **fields) for i in (1, 2, 3)]
        both = await asyncio.gather(
            client.generate(token_ids=[1], **fields),
            client.generate(token_ids=[2], **fields),
            other.generate(token_ids=[3], **fields),
        )
        assert [answer.ids for answer in both] == [answer.ids for answer in solo]
        assert {answer.admitted.request_id for answer in both} == {"same"}
        assert len({answer.admitted.request_key for answer in both}) == 3
        async with client.stream(token_ids=[1], **fields) as stream:
            await anext(stream)
        again = await client.generate(token_ids=[1], **fields)  # a moment after a cancel
        assert again.ids == solo[0].ids
        await other.aclose()
        await running.until_idle()


async def test_internal_fields_in_a_public_request_reach_nobody(model_dir: Path) -> None:
    """B013: the numbers of the worker's fields mean nothing here; what the worker gets is made by
    the router."""
    from legato.v1 import worker_pb2

    seen: list[worker_pb2.Submit] = []
    async with fleet(model_dir) as running:
        service = running.workers[0].service
        accept = service._accept

        def record(link: Any, submit: worker_pb2.Submit, prompt_ids: Any) -> None:
            seen.append(submit)
            accept(link, submit, prompt_ids)

        service._accept = record  # type: ignore[method-assign]
        # Field numbers above those of GenerateRequest only, so that none is misread as its own.
        extra = worker_pb2.Submit(blocks_needed=1_000_000, initial_credit=1 << 30, timeout_s=1e9)
        extra.resume.add(choice=0, ids=[1, 2, 3])
        raw = request().SerializeToString() + _only_above_18(extra)
        target = f"127.0.0.1:{running.routers[0].port}"
        async with grpc.aio.insecure_channel(target) as channel:
            call = channel.unary_unary(
                "/legato.v1.Inference/GenerateOnce",
                request_serializer=lambda message: message,
                response_deserializer=pb.GenerateOnceResponse.FromString,
            )
            answer = await call(raw)
        assert len(answer.choices[0].ids) == 4
        [submit] = seen
        assert submit.blocks_needed == 1 and not submit.resume
        assert submit.initial_credit <= 256 and submit.timeout_s == 0


def _only_above_18(message: object) -> bytes:
    """The wire form of the fields that GenerateRequest does not have."""
    from legato.v1 import worker_pb2

    assert isinstance(message, worker_pb2.Submit)
    for field in list(message.DESCRIPTOR.fields):
        if field.number <= 18:
            message.ClearField(field.name)  # type: ignore[arg-type]
    return message.SerializeToString()


async def test_too_large_a_message_gets_a_clear_error(model_dir: Path) -> None:
    """B101, B116: beyond the limit of a message, and of metadata; other calls go on."""
    async with fleet(model_dir) as running, running.stub() as stub:
        async with bystanders(running):
            huge = pb.GenerateRequest(text="x" * (17 << 20))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GenerateOnce(huge)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in str(caught.value.details())
            call = stub.Generate(iter([pb.ClientFrame(request=huge)]))
            with pytest.raises(grpc.aio.AioRpcError) as streamed:
                async for _ in call:
                    pass
            assert streamed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(grpc.aio.AioRpcError) as headers:
                await stub.GenerateOnce(request(), metadata=[("x-big", "y" * 100_000)])
            assert headers.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(grpc.aio.AioRpcError) as tenant:
                await stub.GenerateOnce(request(), metadata=[("x-legato-tenant", "t" * 129)])
            assert from_rpc_error(tenant.value).field == "x-legato-tenant"
        await until(lambda: not running.held())
