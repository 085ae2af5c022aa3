"""The worker's own door: a router may be of another version, or wrong. Bad Submits are refused by
name on a stream that goes on; frames that make no sense harm nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.errors import Reason, from_rpc_error
from legato.v1 import inference_pb2, worker_pb2 as pb

from tests.bystanders import bystanders
from tests.local_fleet import fleet, until
from tests.raw_link import RawLink, raw_link, submit
from tests.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.timeout(60)

MAX_LEN = 4000
WORKER = {"max_model_len": MAX_LEN, "num_blocks": 160, "max_num_seqs": 8, "simulated_base_ms": 0.2}

Change = Callable[[pb.Submit], object]


def put(name: str, value: object) -> Change:
    return lambda s: setattr(s, name, value)


def sampling(name: str, value: object) -> Change:
    return lambda s: setattr(s.sampling, name, value)


def add(name: str, *values: object) -> Change:
    """Appends to a repeated field, of Submit or of its sampling."""

    def change(s: pb.Submit) -> None:
        owner: Any = s if hasattr(s, name) else s.sampling
        getattr(owner, name).extend(values)

    return change


def first_id(token_id: int) -> Change:
    return lambda s: s.prompt_ids.__setitem__(0, token_id)


def cases() -> Iterator[tuple[str, str, Change]]:
    """(fault or rule, field named by the Nack, what is wrong)."""

    def no_prompt(s: pb.Submit) -> None:
        s.ClearField("prompt_ids")
        s.num_prompt_tokens = 0

    yield "B001", "prompt_ids", no_prompt
    for bad_id in (VOCAB_SIZE, 2**32 - 1):
        yield "B002", "prompt_ids", first_id(bad_id)
        yield "B002", "stop_token_ids", add("stop_token_ids", bad_id)
        yield "B002", "resume.ids", add("resume", pb.ResumedChoice(ids=[bad_id]))
    for value in (nan, inf, -inf):
        for name in (
            *("temperature", "top_p", "min_p", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty"),
        ):
            yield f"B004 {value}", f"sampling.{name}", sampling(name, value)
        yield f"B004 {value}", "timeout_s", put("timeout_s", value)
        bias = inference_pb2.LogitBias(token_id=1, bias=value)
        yield f"B004 {value}", "sampling.logit_bias", add("logit_bias", bias)
    yield "range", "timeout_s", put("timeout_s", -1.0)
    outside = inference_pb2.LogitBias(token_id=VOCAB_SIZE, bias=1)
    yield "B005", "sampling.logit_bias", lambda s: s.sampling.logit_bias.append(outside)
    many = [inference_pb2.LogitBias(token_id=1, bias=0)] * 2000
    yield "B005", "sampling.logit_bias", lambda s: s.sampling.logit_bias.extend(many)
    for number in (21, 10**9, 2**32 - 1):
        yield "B007", "logprobs", put("logprobs", number)
        yield "B007", "prompt_logprobs", put("prompt_logprobs", number)
    for number in (0, 9, 5_000_000, 2**32 - 1):
        yield "B008", "n", put("n", number)
    for number in (0, MAX_LEN - 2, 2**32 - 1):
        yield "max_tokens", "max_tokens", put("max_tokens", number)
    yield "min_tokens", "min_tokens", put("min_tokens", 5)
    yield "stop ids", "stop_token_ids", lambda s: s.stop_token_ids.extend([1] * 65)
    yield "class", "request_class", put("request_class", 9)
    yield "seed", "sampling.seed", lambda s: s.sampling.ClearField("seed")
    yield "ids fewer", "num_prompt_tokens", put("num_prompt_tokens", 2)
    yield "too long", "num_prompt_tokens", put("num_prompt_tokens", 2**32 - 1)
    yield "resume", "resume.choice", lambda s: s.resume.add(choice=1, ids=[1])
    yield "resume", "resume.ids", lambda s: s.resume.add(choice=0, ids=[1] * 4)
    yield "B013", "resume.ids", lambda s: s.resume.add(choice=0, ids=[1] * 100_000)
    yield "length", "prompt_ids", lambda s: _lengthen(s, MAX_LEN)
    yield "length", "prompt_ids", lambda s: _lengthen(s, MAX_LEN + 1)


def _lengthen(s: pb.Submit, length: int) -> None:
    s.prompt_ids.extend([1] * (length - len(s.prompt_ids)))
    s.num_prompt_tokens = length


async def test_every_bad_submit_is_refused_by_name_and_the_link_goes_on(model_dir: Path) -> None:
    """B001, B002, B004, B005, B007, B008, B013 at the worker: a Nack with the field, while two
    streams of another router run, and then a good request on the same stream."""
    wrong = []
    async with fleet(model_dir, worker=WORKER) as running:
        worker = running.workers[0]
        async with bystanders(running), raw_link(worker.port) as link:
            for rid, (rule, field, change) in enumerate(cases(), start=1):
                bad = submit(rid)
                change(bad)
                await link.send(submit=bad)
                nack = await link.nack()
                if (nack.rid, nack.reason, nack.field) != (rid, "INVALID_ARGUMENT", field):
                    wrong.append((rule, field, nack.reason, nack.field, nack.message))
            await link.send(submit=submit(1000))
            ids, ended = await link.answer(1000)
            assert len(ids[0]) == 4 and not ended.error_reason
        await running.until_idle()
    assert not wrong


async def test_never_fits_comes_with_the_numbers(model_dir: Path) -> None:
    async with fleet(model_dir, worker=WORKER) as running:
        async with raw_link(running.workers[0].port) as link:
            await link.send(submit=submit(1, [1] * 3000))
            nack = await link.nack()
            assert nack.reason == Reason.NEVER_FITS
            assert "188" in nack.message and "160" in nack.message
            assert nack.snapshot.free_blocks == 160 and nack.retry_after_s == 0
        assert running.num_steps() == 0


async def test_a_stream_must_open_with_hello(model_dir: Path) -> None:
    async with fleet(model_dir) as running:
        port = running.workers[0].port
        for frame, field in (
            ({"submit": submit()}, "hello"),
            ({"ping": pb.Ping(id=1)}, "hello"),
            ({"hello": pb.Hello(router_id="r", protocol_version=0)}, "hello.protocol_version"),
            ({"hello": pb.Hello(router_id="r", protocol_version=99)}, "hello.protocol_version"),
        ):
            async with raw_link(port, hello=False) as link:
                await link.send(**frame)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await link.read()
                error = from_rpc_error(caught.value)
                assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, field)
        async with raw_link(port, hello=False) as link:
            await link.call.done_writing()
            with pytest.raises(EOFError):
                await link.read()
        await until(lambda: len(running.workers[0].service._links) == 1)  # the router's


async def test_frames_without_sense_harm_nobody(model_dir: Path) -> None:
    """Cancel, Credit and SubmitPart of unknown requests, empty frames, a second Hello."""
    async with fleet(model_dir) as running:
        async with raw_link(running.workers[0].port) as link:
            await link.send(cancel=pb.CancelRequest(rid=7))
            await link.send(cancel=pb.CancelRequest(rid=7, choice=3))
            await link.send(credit=pb.GrantCredit(rid=7, tokens=2**32 - 1))
            await link.send(submit_part=pb.SubmitPart(rid=7, prompt_ids=[1, 2, 3]))
            await link.send(hello=pb.Hello(router_id="again", protocol_version=1))
            await link.send()
            await link.send(ping=pb.Ping(id=42))
            assert (await link.read()) == pb.Pong(id=42)
            await link.send(submit=submit(1, n=2))
            await link.send(cancel=pb.CancelRequest(rid=1, choice=9))
            ids, ended = await link.answer(1)
            assert {choice: len(own) for choice, own in ids.items()} == {0: 4, 1: 4}
            assert not ended.error_reason
            await link.send(cancel=pb.CancelRequest(rid=1))  # it has just ended
            await link.send(credit=pb.GrantCredit(rid=1, tokens=1))
        await running.until_idle()


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on(model_dir: Path) -> None:
    async with (
        fleet(model_dir, worker={"simulated_base_ms": 5.0}) as running,
        raw_link(running.workers[0].port) as link,
    ):
        await link.send(submit=submit(1, max_tokens=20))
        await link.send(submit=submit(1, [9, 9]))
        nacks: list[pb.Nack] = []
        read = link.read

        async def read_but_nacks() -> Any:
            frame = await read()
            while isinstance(frame, pb.Nack):
                nacks.append(frame)
                frame = await read()
            return frame

        link.read = read_but_nacks  # type: ignore[method-assign]
        ids, ended = await link.answer(1)
        assert len(ids[0]) == 20 and not ended.error_reason
        assert [(nack.reason, nack.field) for nack in nacks] == [("INVALID_ARGUMENT", "rid")]
        link.read = read  # type: ignore[method-assign]
        await link.send(submit=submit(1))  # free again
        assert len((await link.answer(1))[0][0]) == 4


async def test_long_prompts_come_in_parts(model_dir: Path) -> None:
    """Parts give the same answer as the whole; too many ids, and a cancel half-way, are handled."""
    prompt = [1 + i % 300 for i in range(1000)]

    def begin(rid: int) -> pb.Submit:
        return submit(rid, prompt[:400], num_prompt_tokens=1000)

    async with fleet(model_dir) as running:
        async with raw_link(running.workers[0].port) as link:
            await link.send(submit=submit(1, prompt))
            whole, _ = await link.answer(1)

            await link.send(submit=begin(2))
            for start, end in ((400, 401), (401, 900), (900, 900), (900, 1000)):
                await link.send(submit_part=pb.SubmitPart(rid=2, prompt_ids=prompt[start:end]))
            assert (await link.answer(2))[0] == whole

            await link.send(submit=begin(3))
            await link.send(submit_part=pb.SubmitPart(rid=3, prompt_ids=prompt))
            nack = await link.nack()
            assert (nack.rid, nack.field) == (3, "num_prompt_tokens")

            await link.send(submit=begin(4))
            await link.send(submit=begin(4))
            assert (await link.nack()).field == "rid"
            await link.send(cancel=pb.CancelRequest(rid=4))
            await link.send(submit_part=pb.SubmitPart(rid=4, prompt_ids=prompt[400:]))
            await link.send(ping=pb.Ping(id=1))
            assert (await link.read()) == pb.Pong(id=1)  # nothing was accepted
        await running.until_idle()


async def test_credit_is_obeyed_to_the_token(model_dir: Path) -> None:
    """B064: exactly so many tokens come as were granted, over all choices."""
    async with fleet(model_dir) as running:
        async with raw_link(running.workers[0].port) as link:
            await link.send(submit=submit(1, max_tokens=50, n=2, initial_credit=6))
            assert await _count_until_quiet(link) == 6
            await link.send(credit=pb.GrantCredit(rid=1, tokens=9))
            assert await _count_until_quiet(link) == 9
            await link.send(submit=submit(2, initial_credit=0))
            assert await _count_until_quiet(link) == 0
            await link.send(credit=pb.GrantCredit(rid=2, tokens=2**32 - 1))
            ids, _ = await link.answer(2)
            assert len(ids[0]) == 4
        await running.until_idle()


async def _count_until_quiet(link: RawLink) -> int:
    """Ids that come until the worker has answered a ping 50 ms after the last of them."""
    count = 0
    await asyncio.sleep(0.05)
    await link.send(ping=pb.Ping(id=1))
    while not isinstance(frame := await link.read(), pb.Pong):
        if isinstance(frame, pb.Step):
            count += len(frame.ids)
    return count


async def test_a_broken_stream_ends_its_requests_and_no_others(model_dir: Path) -> None:
    async with fleet(model_dir, worker={"simulated_base_ms": 2.0}) as running:
        port = running.workers[0].port
        async with raw_link(port) as other:
            await other.send(submit=submit(1, max_tokens=100))
            async with raw_link(port) as link:
                for rid in range(1, 6):
                    await link.send(submit=submit(rid, [rid], max_tokens=3000))
                await link.send(submit=submit(6, num_prompt_tokens=500))  # parts to come
                while not isinstance(await link.read(), pb.Step):
                    pass
            ids, ended = await other.answer(1)
            assert len(ids[0]) == 100 and not ended.error_reason
        await running.until_idle()


async def test_kv_events_and_resync(model_dir: Path) -> None:
    """B103: events are numbered from 1 per stream; a resync tells all there is."""
    async with fleet(model_dir) as running, raw_link(running.workers[0].port, hello=False) as link:
        await link.hello(kv_events=True)
        await link.send(submit=submit(1, [1] * 40))
        stored: list[int] = []
        numbers: list[int] = []
        ended = False
        while not ended or len(stored) < 2:
            frame = await link.read()
            if isinstance(frame, pb.KvEvents):
                numbers.append(frame.seq)
                stored += frame.stored
                assert not frame.cleared
            elif isinstance(frame, pb.Step):
                ended = ended or bool(frame.ended)
        assert numbers == list(range(1, len(numbers) + 1)) and len(stored) == 2
        await link.send(kv_resync=pb.KvResync())
        frame = await link.read()
        assert isinstance(frame, pb.KvEvents)
        assert frame.cleared and set(frame.stored) == set(stored)
        assert frame.seq == numbers[-1] + 1


async def test_describe_and_drain(model_dir: Path) -> None:
    async with fleet(model_dir) as running, running.worker_stub() as stub:
        described = await stub.Describe(pb.DescribeRequest())
        assert described.worker_id == "w0"
        assert described.model.vocab_size == VOCAB_SIZE
        assert described.settings["max_waiting"] == "256"
        async with raw_link(running.workers[0].port) as link:
            await link.send(submit=submit(1, max_tokens=3000))
            while not isinstance(await link.read(), pb.Step):
                pass
            response = await stub.Drain(pb.DrainRequest(deadline_s=0.1))
            assert response.ended_early == 1
            await link.send(submit=submit(2))
            seen: list[str] = []
            while True:
                frame = await link.read()
                if isinstance(frame, pb.Draining):
                    assert frame.deadline_s == pytest.approx(0.1)
                    seen.append("draining")
                elif isinstance(frame, pb.Step) and frame.ended:
                    assert frame.ended[0].error_reason == Reason.DRAINING
                    seen.append("ended")
                elif isinstance(frame, pb.Nack):
                    assert frame.reason == Reason.DRAINING and frame.retry_after_s > 0
                    assert frame.snapshot.draining
                    break
            assert seen == ["draining", "ended"]
        await running.until_idle()
