"""What a step can do beyond its row: causes that reach every caller, books that break, supervisors
that must know, and a client that is not sent round with a request that fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.client import Client
from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2 as pb
from legato_worker.core.scheduler import Scheduler
from legato_worker.runners.simulated import Fault, FaultKind

from tests.bystanders import bystanders
from tests.local_fleet import fleet, until, with_faults
from tests.processes import child, free_port
from tests.raw_link import raw_link, submit

pytestmark = pytest.mark.timeout(60)

BAD = 300
"""A prompt that holds this id meets the fault."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def failure(client: Client, **fields: Any) -> LegatoError:
    with pytest.raises(LegatoError) as caught:
        await client.generate(max_tokens=20, ignore_eos=True, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (FaultKind.RAISE, "scripted fault"),
        (FaultKind.NO_LOGITS, "not finite"),
        (FaultKind.BAD_ID, "outside the vocabulary"),
    ],
)
async def test_the_cause_reaches_the_caller_of_every_kind_of_request(
    model_dir: Path, kind: FaultKind, cause: str
) -> None:
    """Alone, in the middle or at the end of a prompt, with n, with log probabilities; RAISE alone
    makes the engine take a step apart."""
    load = with_faults(Fault(kind, token_id=BAD))
    async with fleet(model_dir, load=load) as running:
        async with running.client(max_resumes=0) as client, bystanders(running):
            for fields in (
                {"token_ids": [BAD]},
                {"token_ids": [5, 6, BAD, 7]},
                {"token_ids": [BAD, 9], "n": 3, "temperature": 1.0},
                {"token_ids": [*range(1, 100), BAD]},
                {"token_ids": [BAD], "logprobs": 2},
            ):
                error = await failure(client, **fields)
                assert error.reason is Reason.INTERNAL and cause in error.message
                assert error.retry_after_s is None
        engine = running.workers[0].engine
        assert (engine.num_isolated_steps > 0) == (kind is FaultKind.RAISE)
        assert running.workers[0].failure is None
        await running.until_idle()


async def test_the_beginning_of_a_failed_prompt_is_computed_anew(model_dir: Path) -> None:
    """Its blocks may hold garbage: the answer to the same beginning is that of a fresh worker."""
    beginning = [1 + i % 200 for i in range(64)]
    async with fleet(model_dir) as healthy, healthy.client() as client:
        alone = await client.generate(token_ids=beginning, max_tokens=30, ignore_eos=True)
    load = with_faults(Fault(FaultKind.RAISE, token_id=BAD))
    async with fleet(model_dir, load=load) as running, running.client() as client:
        await failure(client, token_ids=[*beginning, BAD])
        again = await client.generate(token_ids=beginning, max_tokens=30, ignore_eos=True)
        assert again.ids == alone.ids and again.usage.cached_tokens == 0
        await running.until_idle()


async def test_a_client_is_not_sent_on_with_a_request_that_fails(model_dir: Path) -> None:
    """INTERNAL is final: no resume, no other worker, one try. Unary callers hear the same."""
    load = with_faults(Fault(FaultKind.NO_LOGITS, token_id=BAD))
    async with fleet(model_dir, num_workers=2, load=load) as running, running.client() as client:
        error = await failure(client, token_ids=[BAD])
        assert error.reason is Reason.INTERNAL
        assert sum(worker.service._next_key - 1 for worker in running.workers) == 1
        async with running.stub() as stub:
            asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[BAD]), max_tokens=3)
            with pytest.raises(grpc.aio.AioRpcError) as unary:
                await stub.GenerateOnce(asked)
            assert unary.value.code() is grpc.StatusCode.INTERNAL
            assert unary.value.details() == str(error)
        for timeline in running.routers[0].service._timelines._timelines.values():
            assert timeline.events[-1].name == "refused"


async def test_a_dead_device_fails_those_that_run_and_those_that_wait(model_dir: Path) -> None:
    """B091: the cause reaches every caller, by router or link, in its queue or in mid-answer, at
    once; new ones are refused."""
    load = with_faults(Fault(FaultKind.FATAL, token_id=BAD))
    worker = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    async with (
        fleet(model_dir, load=load, worker=worker) as running,
        running.client(max_resumes=0) as client,
        raw_link(running.workers[0].port) as raw,
    ):
        await raw.send(submit=submit(1, max_tokens=4000))
        long = {"max_tokens": 4000, "ignore_eos": True}
        streams = [client.stream(token_ids=[i], **long) for i in range(1, 11)]  # type: ignore[arg-type]
        for stream in streams[:3]:
            await anext(stream)  # these run, and that of the raw link; the others wait
        for stream in streams:
            stream._start()
        await until(lambda: all(stream.admitted for stream in streams))
        started = time.monotonic()
        bad = client.stream(token_ids=[BAD], max_tokens=5, request_class="interactive")
        bad._start()
        await until(lambda: bad.admitted is not None)
        await streams[0].aclose()  # a seat is free, for the most urgent
        for stream in [*streams[1:], bad]:
            with pytest.raises(LegatoError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.reason is Reason.INTERNAL
            assert "the device is gone" in caught.value.message
        _, ended = await raw.answer(1)
        assert ended.error_reason == Reason.INTERNAL and "device is gone" in ended.error_message
        assert time.monotonic() - started < 2
        with pytest.raises(LegatoError) as refused:
            await client.generate(token_ids=[1], max_tokens=2)
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert await running.exit_code(running.workers[0]) == 1
        assert "the device is gone" in str(running.workers[0].failure)


@pytest.mark.parametrize("broken", ["commit", "commit and end_all"])
async def test_an_engine_that_breaks_in_the_scheduler(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """B091: even when the scheduler can no longer say who is there, nobody is left waiting."""
    async with fleet(model_dir) as running, running.client(max_resumes=0) as client:
        streams = [
            client.stream(token_ids=[i], max_tokens=4000, ignore_eos=True) for i in range(1, 6)
        ]
        await asyncio.gather(*(anext(stream) for stream in streams))

        def fail(*_: object, **__: object) -> None:
            raise AssertionError("the books do not balance")

        if "end_all" in broken:
            monkeypatch.setattr(Scheduler, "end_all", fail)
        monkeypatch.setattr(Scheduler, "commit", fail)
        reasons = set()
        for stream in streams:
            with pytest.raises(LegatoError) as caught:
                async with asyncio.timeout(3):
                    async for _ in stream:
                        pass
            reasons.add(caught.value.reason)
        assert reasons == {Reason.WORKER_LOST if "end_all" in broken else Reason.INTERNAL}
        assert await running.exit_code(running.workers[0]) == 1
        assert str(running.workers[0].failure) == "the books do not balance"  # the first cause


async def test_the_other_worker_serves_on_when_one_has_died(model_dir: Path) -> None:
    load = with_faults(Fault(FaultKind.FATAL, token_id=BAD))
    async with (
        fleet(model_dir, num_workers=2, load=load) as running,
        running.client(max_resumes=0) as client,
    ):
        assert (await failure(client, token_ids=[BAD])).reason is Reason.INTERNAL
        await until(lambda: sum(link.view is not None for link in running.links()) == 1)
        for i in range(1, 10):
            await client.generate(token_ids=[i], max_tokens=3)


async def test_the_exit_code_tells_the_supervisor(model_dir: Path, tmp_path: Path) -> None:
    """B092: a process of its own whose device dies, and that is sent SIGTERM while it cleans up:
    the first cause is in its log, and the exit code says failure."""
    port = free_port()
    arguments = ("-m", "tests.faulty_worker", str(port), str(model_dir), "fatal", str(BAD))
    async with child(tmp_path, *arguments, port=port) as victim:
        await victim.until_healthy()
        async with raw_link(port) as link:
            await link.send(submit=submit(1, [1], max_tokens=4000))
            await link.send(submit=submit(2, [BAD]))
            _, ended = await link.answer(2)
            assert ended.error_reason == Reason.INTERNAL
            victim.send(signal.SIGTERM)
            assert await victim.exit_code() == 1
        assert "the device is gone" in victim.log.read_text()


@contextlib.asynccontextmanager
async def health(port: int) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check() -> int:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
            return int(reply.status)

        yield check


async def test_health_follows_its_workers_and_long_answers_do_not_trouble_it(
    model_dir: Path,
) -> None:
    """B094, B095: a router is NOT_SERVING without a worker, and SERVING again with one; a worker
    that is busy for longer than stall_s is well."""
    worker = {"stall_s": 0.3, "simulated_base_ms": 5.0}
    async with (
        fleet(model_dir, worker=worker) as running,
        running.client() as client,
        health(running.routers[0].port) as router,
        health(running.workers[0].port) as check,
    ):
        long = client.stream(token_ids=[1], max_tokens=2000, ignore_eos=True)
        await anext(long)
        for _ in range(15):
            await asyncio.sleep(0.05)
            assert await check() == SERVING
        await long.aclose()
        await _until_status(router, SERVING)
        running.lose(0)
        await _until_status(router, NOT_SERVING)
        assert await check() == SERVING
        await running.wires[0].open()
        await _until_status(router, SERVING)


async def _until_status(check: Callable[[], Awaitable[int]], status: int) -> None:
    deadline = time.monotonic() + 5
    while await check() != status:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
