"""Processes that are killed, frozen, drained and forced."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.client import Client
from legato.errors import LegatoError, Reason
from legato.v1 import worker_pb2
from legato_deploy.store import ModelStore
from legato_router import worker_link

from tests.local_fleet import fleet, until
from tests.processes import Child, router, worker
from tests.raw_link import raw_link

pytestmark = pytest.mark.timeout(90)

FIELDS: dict[str, Any] = {"token_ids": [1, 2], "max_tokens": 300, "ignore_eos": True}


@pytest.fixture
def fingerprint(model_dir: Path) -> str:
    """As the command line gives it to its processes."""
    return ModelStore(model_dir.parent).resolve(model_dir).fingerprint


@contextlib.asynccontextmanager
async def watched(child: Child) -> Any:
    """An open health Watch, as a probe or a proxy keeps one."""
    async with grpc.aio.insecure_channel(child.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await call.read()
        yield call


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_process_dies_or_freezes(
    model_dir: Path,
    fingerprint: str,
    tmp_path: Path,
    how: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed one is noticed at once, a frozen one by its silence; answers go on elsewhere. One
    that thaws is used again."""
    monkeypatch.setattr(worker_link, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(worker_link, "MAX_SILENCE_S", 0.8)
    async with worker(tmp_path, model_dir) as victim:
        await victim.until_healthy()
        async with (
            fleet(
                model_dir,
                other_workers=[victim.address],
                fingerprint=fingerprint,
                worker={"simulated_base_ms": 2.0},
            ) as running,
            running.client(max_resumes=0) as client,
        ):
            alone = await client.generate(**FIELDS)
            streams = [client.stream(**FIELDS, session=str(i)) for i in range(20)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            here = [s for s in streams if s.admitted and s.admitted.worker.startswith("process")]
            assert here
            started = time.monotonic()
            victim.send(how)

            async def rest(stream: Any) -> str:
                return "".join([delta.text async for delta in stream])

            texts = await asyncio.gather(*(rest(stream) for stream in streams))
            assert time.monotonic() - started < 5
            assert {len(text) > 0 and alone.text.endswith(text) for text in texts} == {True}
            assert all(s.finished and s.finished.timings.moves == 1 for s in here)
            assert running.links()[1].view is None
            if how is signal.SIGSTOP:
                victim.send(signal.SIGCONT)
                await until(lambda: running.links()[1].view is not None)
                # The worker has ended what the broken link had left it with.
                async with grpc.aio.insecure_channel(victim.address) as channel:
                    from legato.v1 import worker_pb2_grpc

                    stub = worker_pb2_grpc.WorkerStub(channel)
                    described = await stub.Describe(worker_pb2.DescribeRequest())
                    assert described.snapshot.running == 0


async def test_a_router_process_is_killed(
    model_dir: Path, fingerprint: str, tmp_path: Path
) -> None:
    async with fleet(model_dir, fingerprint=fingerprint) as running:
        workers = [wire.address for wire in running.wires]
        async with router(tmp_path, model_dir, workers) as victim, fleet_router(running) as other:
            await victim.until_healthy()
            async with Client(f"{victim.address},{other}") as client:
                pieces = []
                async with client.stream(**FIELDS) as stream:
                    async for delta in stream:
                        pieces.append(delta.text)
                        if victim.process.returncode is None and len(pieces) == 30:
                            victim.send(signal.SIGKILL)
                            await victim.exit_code()
                    assert stream.num_resumes == 1
                alone = await client.generate(**FIELDS)
                assert "".join(pieces) == alone.text
        await running.until_idle()


@contextlib.asynccontextmanager
async def fleet_router(running: Any) -> Any:
    """The address of a router of the fleet that has the key of the processes."""
    running.routers[0].service._resume_key = b"k" * 32
    yield f"127.0.0.1:{running.routers[0].port}"


async def test_a_worker_drains_on_sigterm(
    model_dir: Path, fingerprint: str, tmp_path: Path
) -> None:
    """B097: streams finish, new requests are refused, and neither the open Watch, nor the routers'
    link, nor an idle one hold the exit."""
    async with worker(tmp_path, model_dir, "--drain-s", "10") as victim:
        await victim.until_healthy()
        async with (
            fleet(
                model_dir,
                num_workers=0,
                other_workers=[victim.address],
                fingerprint=fingerprint,
            ) as running,
            running.client(max_resumes=0) as client,
            watched(victim) as watch,
            raw_link(victim.port) as idle,
        ):
            alone = await client.generate(**FIELDS)
            streams = [client.stream(**FIELDS) for _ in range(5)]
            for stream in streams:
                await anext(stream)
            victim.send(signal.SIGTERM)
            assert isinstance(await idle.read(), worker_pb2.Draining)
            await until(lambda: running.links()[0].draining)
            with pytest.raises(LegatoError) as refused:
                await client.generate(token_ids=[5], max_tokens=2)
            assert refused.value.code is grpc.StatusCode.UNAVAILABLE
            assert refused.value.retry_after_s is not None
            for stream in streams:
                text = "".join([delta.text async for delta in stream])
                assert alone.text.endswith(text)
                assert stream.finished is not None and stream.finished.timings.moves == 0
            ended = time.monotonic()
            assert await victim.exit_code() == 0
            assert time.monotonic() - ended < 4
            with pytest.raises(EOFError) as ended_well:
                while await idle.read():
                    pass
            assert ended_well.value.args == (grpc.StatusCode.OK,)
            told = await watch.read()  # before it broke
            assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_what_a_drain_cannot_wait_for_moves_on(
    model_dir: Path, fingerprint: str, tmp_path: Path
) -> None:
    """Answers longer than the grace go on at another worker when it ends; exit code 0."""
    async with worker(tmp_path, model_dir, "--drain-s", "0.5") as victim:
        await victim.until_healthy()
        async with (
            fleet(
                model_dir,
                other_workers=[victim.address],
                fingerprint=fingerprint,
                worker={"simulated_base_ms": 2.0},
            ) as running,
            running.client(max_resumes=0) as client,
        ):
            fields = FIELDS | {"max_tokens": 800}
            streams = [client.stream(**fields, session=str(i)) for i in range(12)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            here = [s for s in streams if s.admitted and s.admitted.worker.startswith("process")]
            assert here
            victim.send(signal.SIGTERM)

            async def rest(stream: Any) -> str:
                return "".join([delta.text async for delta in stream])

            texts = await asyncio.gather(*(rest(stream) for stream in streams))
            alone = await client.generate(**fields)
            assert all(text and alone.text.endswith(text) for text in texts)
            assert all(s.finished and s.finished.timings.moves == 1 for s in here)
            assert await victim.exit_code() == 0


async def test_a_router_drains_on_sigterm(
    model_dir: Path, fingerprint: str, tmp_path: Path
) -> None:
    """B097: open streams finish, new ones are refused as DRAINING, the Watch does not hold it."""
    async with (
        fleet(model_dir, fingerprint=fingerprint, worker={"simulated_base_ms": 2.0}) as running,
        router(tmp_path, model_dir, [running.wires[0].address], "--drain-s", "10") as victim,
    ):
        await victim.until_healthy()
        async with Client(victim.address, max_resumes=0) as client, watched(victim) as watch:
            alone = await client.generate(**FIELDS)
            streams = [client.stream(**FIELDS) for _ in range(5)]
            for stream in streams:
                await anext(stream)
            victim.send(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(LegatoError) as refused:
                await client.generate(token_ids=[5], max_tokens=2)
            assert refused.value.reason is Reason.DRAINING
            for stream in streams:
                assert alone.text.endswith("".join([delta.text async for delta in stream]))
            ended = time.monotonic()
            assert await victim.exit_code() == 0
            assert time.monotonic() - ended < 4
        await running.until_idle()


@pytest.mark.parametrize("what", ["worker", "router"])
async def test_a_second_signal_forces(
    model_dir: Path, fingerprint: str, tmp_path: Path, what: str
) -> None:
    """B097: whoever asks twice does not wait for the streams."""
    async with contextlib.AsyncExitStack() as stack:
        if what == "worker":
            victim = await stack.enter_async_context(worker(tmp_path, model_dir))
            await victim.until_healthy()
            link = await stack.enter_async_context(raw_link(victim.port))
            from tests.raw_link import submit

            await link.send(submit=submit(1, max_tokens=4000))
            while not isinstance(await link.read(), worker_pb2.Step):
                pass
        else:
            running = await stack.enter_async_context(fleet(model_dir, fingerprint=fingerprint))
            victim = await stack.enter_async_context(
                router(tmp_path, model_dir, [running.wires[0].address])
            )
            await victim.until_healthy()
            client = await stack.enter_async_context(Client(victim.address, max_resumes=0))
            stream = client.stream(**FIELDS | {"max_tokens": 4000}, initial_credit=5)
            await anext(stream)
        victim.send(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert victim.process.returncode is None  # it waits for the stream
        victim.send(signal.SIGTERM)
        assert await victim.exit_code(3) == 130


@pytest.mark.parametrize("what", ["worker", "router"])
async def test_an_address_in_use_is_one_clear_line(
    model_dir: Path, tmp_path: Path, what: str
) -> None:
    async with fleet(model_dir) as running:
        port = running.workers[0].port if what == "worker" else running.routers[0].port
        listen = ("--listen", f"127.0.0.1:{port}")
        if what == "worker":
            started = worker(tmp_path, model_dir, *listen)
        else:
            started = router(tmp_path, model_dir, [running.wires[0].address], *listen)
        async with started as victim:
            assert await victim.exit_code() not in (0, None)
            last = victim.log.read_text().strip().splitlines()[-1]
            assert last.startswith("legato:") and str(port) in last
            assert "Traceback" not in victim.log.read_text()
