"""A row that fails ends alone; an engine that fails ends everything at once and says why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.errors import LegatoError, Reason
from legato_worker.runners.simulated import Fault, FaultKind

from tests.bystanders import bystanders
from tests.local_fleet import Fleet, fleet, until, with_faults

pytestmark = pytest.mark.timeout(60)
POISON = 77


@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.NO_LOGITS, FaultKind.BAD_ID])
@pytest.mark.parametrize("depth", [0, 1])
async def test_a_failing_row_ends_alone(model_dir: Path, kind: FaultKind, depth: int) -> None:
    """B050; its mates are byte-identical to an undisturbed run (``bystanders`` compares)."""
    load = with_faults(Fault(kind, token_id=POISON))
    async with fleet(model_dir, load=load, worker={"depth": depth}) as running:
        async with running.client() as client, bystanders(running):
            for _ in range(3):
                with pytest.raises(LegatoError) as caught:
                    await client.generate(token_ids=[5, POISON, 6], max_tokens=20)
                assert caught.value.reason is Reason.INTERNAL
            answer = await client.generate(token_ids=[5, 6], max_tokens=20, ignore_eos=True)
            assert len(answer.ids) == 20
        await running.until_idle()


async def test_what_a_failed_row_wrote_is_never_matched(model_dir: Path) -> None:
    """The same long prompt again and again: each one is computed anew, none hits the cache."""
    load = with_faults(Fault(FaultKind.NO_LOGITS, token_id=POISON))
    async with fleet(model_dir, load=load) as running, running.client() as client:
        prompt = [POISON, *range(1, 60)]
        for _ in range(3):
            with pytest.raises(LegatoError):
                await client.generate(token_ids=prompt, max_tokens=4)
        await running.until_idle()
        counters = running.workers[0].engine._scheduler.counters()
        assert counters.prefix_hit_tokens == 0


async def test_a_dead_engine_ends_all_calls_with_the_cause_and_exits_nonzero(
    model_dir: Path,
) -> None:
    """B091, B092."""
    load = with_faults(Fault(FaultKind.FATAL, token_id=POISON))
    async with fleet(model_dir, load=load, router={"max_queue_s": 1.0}) as running:
        async with running.client(max_resumes=0) as client:
            calls = [
                asyncio.create_task(
                    client.generate(token_ids=[n, 3], max_tokens=4000, ignore_eos=True)
                )
                for n in range(1, 6)
            ]
            await until(lambda: len(running.workers[0].engine._scheduler.table.running) == 5)
            with pytest.raises(LegatoError):
                await client.generate(token_ids=[5, POISON], max_tokens=20)
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(r, LegatoError) for r in results), results
            assert any("the device is gone" in str(r) for r in results), results
        assert await running.exit_code(running.workers[0]) == 1


async def _health(running: Fleet) -> int:
    target = f"127.0.0.1:{running.workers[0].port}"
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        return int(reply.status)


async def test_health_follows_step_progress_in_both_directions(model_dir: Path) -> None:
    """B094, B095: a frozen step turns it NOT_SERVING, and back when steps go on."""
    load = with_faults(Fault(FaultKind.STALL, token_id=POISON, stall_s=3.0))
    async with fleet(model_dir, load=load, worker={"stall_s": 1.0}) as running:
        serving, failing = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert await _health(running) == serving
        async with running.client() as client:
            call = asyncio.create_task(client.generate(token_ids=[POISON, 2], max_tokens=4))
            seen = []
            while not call.done():
                seen.append(await _health(running))
                await asyncio.sleep(0.1)
            assert failing in seen and seen[0] == serving
            assert len((await call).ids) <= 4
        await asyncio.sleep(1.0)
        assert await _health(running) == serving
