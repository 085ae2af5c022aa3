"""Bounded queues, refusals that say why and when, and load that spreads."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from legato.errors import LegatoError, Reason

from tests.local_fleet import fleet, until

pytestmark = pytest.mark.timeout(60)


async def test_a_full_worker_sends_on_to_another(model_dir: Path) -> None:
    """Two workers of one seat each and no waiting room: both get one, no call fails."""
    worker = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_waiting": 0}
    async with fleet(model_dir, num_workers=2, worker=worker) as running:
        async with running.client() as client:
            answers = await asyncio.gather(
                *[
                    client.generate(token_ids=[n, 2], max_tokens=50, ignore_eos=True)
                    for n in range(1, 9)
                ]
            )
        assert all(len(answer.ids) == 50 for answer in answers)
        assert set(Counter(a.admitted.worker for a in answers)) == {"w0", "w1"}
        await running.until_idle()


async def test_the_routers_queue_is_bounded_and_says_when_to_retry(model_dir: Path) -> None:
    worker = {"max_num_seqs": 1, "max_waiting": 0, "simulated_base_ms": 5.0}
    router = {"max_queued": 2, "max_queue_s": 30.0}
    async with fleet(model_dir, worker=worker, router=router) as running:
        async with running.client() as client:
            calls = [
                asyncio.create_task(
                    client.generate(token_ids=[n, 2], max_tokens=100, ignore_eos=True)
                )
                for n in range(1, 20)
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [r for r in results if isinstance(r, LegatoError)]
        assert refused and len(refused) < len(results)
        assert {r.reason for r in refused} == {Reason.QUEUE_FULL}
        assert all((r.retry_after_s or 0) > 0 and r.metadata["limit"] for r in refused)
        await running.until_idle()


async def test_waiting_too_long_is_a_refusal_that_cost_no_step(model_dir: Path) -> None:
    worker = {"max_num_seqs": 1, "max_waiting": 0, "simulated_base_ms": 5.0}
    async with fleet(model_dir, worker=worker, router={"max_queue_s": 0.2}) as running:
        async with running.client() as client:
            first = asyncio.create_task(
                client.generate(token_ids=[1, 2], max_tokens=300, ignore_eos=True)
            )
            await until(lambda: bool(running.workers[0].engine._scheduler.table.running))
            with pytest.raises(LegatoError) as caught:
                await client.generate(token_ids=[2, 2], max_tokens=5)
            assert caught.value.reason in (Reason.QUEUE_TIMEOUT, Reason.QUEUE_FULL)
            assert len((await first).ids) == 300
        await running.until_idle()


async def test_a_burst_spreads_over_idle_workers(model_dir: Path) -> None:
    """B080: 64 calls at once, 8 idle workers, 2 routers: own picks count at once."""
    worker = {"simulated_base_ms": 150.0, "max_num_seqs": 16}
    async with fleet(model_dir, num_workers=8, num_routers=2, worker=worker) as running:
        async with running.client() as client:
            answers = await asyncio.gather(
                *[
                    client.generate(token_ids=[n] * 200, max_tokens=20, ignore_eos=True)
                    for n in range(1, 65)
                ]
            )
        spread = Counter(answer.admitted.worker for answer in answers)
        assert len(spread) == 8 and max(spread.values()) <= 10, spread
        await running.until_idle()


async def test_equal_prompts_meet_on_one_worker_until_load_outweighs(model_dir: Path) -> None:
    """B079: the same prefix goes to the same idle worker; a burst of it does not all pile up."""
    worker = {"simulated_base_ms": 5.0}
    async with fleet(model_dir, num_workers=4, worker=worker) as running:
        async with running.client() as client:
            prompt = list(range(1, 100))
            alone = [
                (await client.generate(token_ids=prompt, max_tokens=2)).admitted.worker
                for _ in range(5)
            ]
            assert len(set(alone)) == 1
            burst = await asyncio.gather(
                *[client.generate(token_ids=prompt, max_tokens=40) for _ in range(80)]
            )
            spread = Counter(answer.admitted.worker for answer in burst)
            assert len(spread) >= 2 and max(spread.values()) < 60, spread
        await running.until_idle()


async def test_unary_equals_stream_for_every_length(model_dir: Path) -> None:
    """B061, B062: same ids, text, reason and usage on both paths, stop strings included."""
    from legato.v1 import inference_pb2 as pb

    async with fleet(model_dir) as running, running.client() as client:
        async with running.stub() as stub:
            for max_tokens in range(1, 33):
                request = pb.GenerateRequest(
                    text="one two three",
                    max_tokens=max_tokens,
                    stop=pb.Stop(strings=["e", "zz"], min_tokens=min(8, max_tokens)),
                )
                unary = await stub.GenerateOnce(request, timeout=10)
                streamed = await client.generate(
                    "one two three",
                    max_tokens=max_tokens,
                    stop=["e", "zz"],
                    min_tokens=min(8, max_tokens),
                )
                [choice] = unary.choices
                assert tuple(choice.ids) == streamed.ids
                assert choice.text == streamed.text
                assert choice.stop_string == streamed.choices[0].stop_string
                assert (
                    pb.FinishReason.Name(choice.finish_reason)
                    .lower()
                    .endswith(streamed.choices[0].finish_reason.value)
                )
                assert unary.finished.usage == streamed.usage
                assert streamed.usage.completion_tokens == len(streamed.ids)
        await running.until_idle()
