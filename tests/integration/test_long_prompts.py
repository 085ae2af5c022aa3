"""Long prompts: they travel in parts, they are tokenized beside the loop, and nobody waits for them
(B023, B083, B101)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.errors import LegatoError, Reason
from legato.v1 import worker_pb2

from tests.bystanders import bystanders
from tests.local_fleet import fleet
from tests.processes import router, worker

pytestmark = pytest.mark.timeout(90)

MAX_LEN = 131_072
WORKER = {
    "max_model_len": MAX_LEN,
    "num_blocks": 3 * MAX_LEN // 16,
    "max_num_batched_tokens": 2048,
    "max_prefill_chunk": 2048,
    "simulated_base_ms": 0.5,
}


def long_ids(length: int) -> list[int]:
    return [1 + (i * i) % 380 for i in range(length)]


async def test_a_prompt_of_a_hundred_thousand_ids(model_dir: Path) -> None:
    """It travels in parts, and its answer is that of the same prompt on a worker that got it
    whole; streams beside it do not notice."""
    parts: list[int] = []
    async with fleet(model_dir, worker=WORKER) as running, running.client() as client:
        service = running.workers[0].service
        take = service._submit_part

        def record(link: Any, part: worker_pb2.SubmitPart) -> None:
            parts.append(len(part.prompt_ids))
            take(link, part)

        service._submit_part = record  # type: ignore[method-assign]
        ids = long_ids(100_000)
        async with bystanders(running):
            answer = await client.generate(token_ids=ids, max_tokens=8, ignore_eos=True)
        assert parts == [16_384] * 5 + [100_000 - 6 * 16_384]
        assert answer.usage.prompt_tokens == 100_000
        again = await client.generate(token_ids=ids, max_tokens=8, ignore_eos=True)
        assert again.ids == answer.ids and again.usage.cached_tokens >= 99_900
        shorter = await client.generate(token_ids=ids[:16_384], max_tokens=4, ignore_eos=True)
        assert len(parts) == 12  # two prompts in parts; this one went whole
        assert len(shorter.ids) == 4
        await running.until_idle()


async def test_a_long_prompt_whose_client_leaves_while_it_travels(model_dir: Path) -> None:
    async with fleet(model_dir, worker=WORKER) as running, running.client() as client:
        for delay_s in (0.0, 0.01, 0.02, 0.03, 0.05, 0.1):
            stream = client.stream(token_ids=long_ids(100_000), max_tokens=8)
            stream._start()
            await asyncio.sleep(delay_s)
            await stream.aclose()
        await running.until_idle()


async def test_a_text_beyond_the_model_is_refused_before_it_is_tokenized(model_dir: Path) -> None:
    """B083: size first. 15 MB for a model of 64 tokens cost no work."""
    async with (
        fleet(model_dir, worker={"max_model_len": 64}) as running,
        running.client() as client,
    ):
        started = time.monotonic()
        with pytest.raises(LegatoError) as caught:
            await client.generate("word " * 3_000_000, max_tokens=1)
        assert caught.value.reason is Reason.INVALID_ARGUMENT and caught.value.field == "text"
        assert time.monotonic() - started < 1.5


@contextlib.asynccontextmanager
async def probed(address: str, latencies: list[float]) -> AsyncIterator[None]:
    """A health probe each 20 ms while the block runs."""
    over = asyncio.Event()

    async def probe() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not over.is_set():
                started = time.monotonic()
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
                latencies.append(time.monotonic() - started)
                await asyncio.sleep(0.02)

    task = asyncio.create_task(probe())
    try:
        yield
    finally:
        over.set()
        await task


async def test_probes_are_answered_while_long_prompts_come(model_dir: Path, tmp_path: Path) -> None:
    """B083: a router and a worker process, texts of 1.5 MB and prompts of 100,000 ids one after
    the other: nearly every probe is answered within 100 ms, none takes long."""
    options = ("--max-model-len", str(MAX_LEN), "--num-blocks", str(3 * MAX_LEN // 16))
    async with (
        worker(tmp_path, model_dir, *options) as one,
        router(tmp_path, model_dir, [one.address]) as door,
    ):
        await asyncio.gather(one.until_healthy(), door.until_healthy())
        from legato.client import Client

        text = "the quick brown fox jumps over the lazy dog. " * 30_000
        latencies: dict[str, list[float]] = {"router": [], "worker": []}
        async with (
            Client(door.address) as client,
            probed(door.address, latencies["router"]),
            probed(one.address, latencies["worker"]),
        ):
            for number in range(3):
                with contextlib.suppress(LegatoError):
                    await client.generate(text, max_tokens=1)
                await client.generate(
                    token_ids=[*long_ids(100_000), 1 + number], max_tokens=2, ignore_eos=True
                )
        for name, measured in latencies.items():
            measured.sort()
            late = [latency for latency in measured if latency > 0.1]
            assert len(late) <= 0.03 * len(measured), (name, late, len(measured))
            assert measured[-1] < 0.4, (name, measured[-1])
