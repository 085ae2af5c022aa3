"""Deadlines, of the call and of the request's objective, in queues and in mid-answer (B025)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.errors import LegatoError, Reason, from_rpc_error
from legato.v1 import inference_pb2 as pb
from legato_router.tokenizer import ModelTokenizer

from tests.local_fleet import fleet, until

pytestmark = pytest.mark.timeout(60)

LONG: dict[str, Any] = {"token_ids": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True}
ONE_SEAT = {"max_num_seqs": 1, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("kind", ["objective", "call"])
@pytest.mark.parametrize("queue", ["worker", "router"])
async def test_an_expired_request_never_costs_a_step(
    model_dir: Path, queue: str, kind: str
) -> None:
    """It waits behind another and is dropped in its queue; nothing of it is ever scheduled."""
    async with fleet(model_dir, worker=ONE_SEAT) as running, running.client() as client:
        scheduler = running.workers[0].engine._scheduler
        async with client.stream(**LONG) as first:
            await anext(first)
            ahead = []
            if queue == "router":  # fill the backlog that the worker is given
                ahead = [client.stream(**LONG) for _ in range(8)]
                for stream in ahead:
                    stream._start()
                await until(lambda: len(scheduler.table.waiting) == 8)
            deadline: dict[str, Any] = (
                {"deadline_s": 0.15} if kind == "objective" else {"timeout_s": 0.15}
            )
            started = time.monotonic()
            with pytest.raises(LegatoError) as caught:
                await client.generate(token_ids=[7], max_tokens=5, **deadline)
            assert caught.value.reason is Reason.DEADLINE_EXCEEDED
            assert 0.1 < time.monotonic() - started < 0.5
            await until(lambda: len(scheduler.table.requests) == 1 + len(ahead), 1.0)
            assert not len(running.routers[0].service._dispatcher._room)
            for stream in ahead:
                await stream.aclose()
            await anext(first)
        await running.until_idle()
        assert scheduler.kv.pool.num_cached == len(scheduler.kv.pool.cached_hashes())


async def test_a_request_whose_time_is_up_is_not_sent_to_a_worker(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing took longer than the deadline: no worker hears of the request."""
    encode = ModelTokenizer.encode

    def slow(self: ModelTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.2)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(ModelTokenizer, "encode", slow)
    async with fleet(model_dir) as running, running.client() as client:
        with pytest.raises(LegatoError) as caught:
            await client.generate("hello", max_tokens=4, deadline_s=0.1)
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert running.num_steps() == 0 and running.links()[0]._next_rid == 1


async def test_time_spent_on_tokenizing_is_not_counted_twice(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call's deadline of 0.8 s with 0.35 s of tokenizing leaves 0.45 s, not 0.1."""
    encode = ModelTokenizer.encode

    def slow(self: ModelTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.35)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(ModelTokenizer, "encode", slow)
    async with fleet(model_dir) as running, running.client() as client:
        answer = await client.generate("hello", max_tokens=200, ignore_eos=True, timeout_s=0.8)
        assert len(answer.ids) == 200  # 0.2 s of steps


async def test_a_deadline_in_mid_answer_leaves_what_there_is(model_dir: Path) -> None:
    """Finished with reason DEADLINE, the deltas sent stand, and usage agrees with them."""
    async with fleet(model_dir) as running, running.client() as client:
        whole = await client.generate(**LONG | {"max_tokens": 800})
        started = time.monotonic()
        answer = await client.generate(**LONG, deadline_s=0.3)
        assert 0.2 < time.monotonic() - started < 0.8
        assert answer.finish_reason == "deadline"
        assert answer.choices[0].finish_reason == "deadline"
        assert 0 < len(answer.ids) < 4000
        shared = min(len(answer.ids), len(whole.ids))
        assert answer.ids[:shared] == whole.ids[:shared]
        assert answer.usage.completion_tokens == len(answer.ids)
        await running.until_idle()


async def test_a_call_that_runs_out_of_time_stops_its_worker(model_dir: Path) -> None:
    async with fleet(model_dir) as running, running.stub() as stub:
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1]), max_tokens=4000, stop=pb.Stop(ignore_eos=True)
        )
        try:  # the worker's word and gRPC's own run a race
            answer = await stub.GenerateOnce(asked, timeout=0.2)
        except grpc.aio.AioRpcError as error:
            assert from_rpc_error(error).reason is Reason.DEADLINE_EXCEEDED
        else:
            assert answer.finished.reason == pb.FINISH_REASON_DEADLINE
        await running.until_idle(1.0)
        steps = running.num_steps()
        await asyncio.sleep(0.05)
        assert running.num_steps() == steps


async def test_the_sooner_deadline_holds(model_dir: Path) -> None:
    async with fleet(model_dir) as running, running.client() as client:
        answer = await client.generate(**LONG, deadline_s=0.15, timeout_s=20)
        assert answer.finish_reason == "deadline"
        started = time.monotonic()
        try:  # the worker's word and gRPC's own run a race
            answer = await client.generate(**LONG, deadline_s=20, timeout_s=0.15)
        except LegatoError as error:
            assert error.reason is Reason.DEADLINE_EXCEEDED
        else:
            assert answer.finish_reason == "deadline"
        assert time.monotonic() - started < 0.5
        await running.until_idle()


async def test_a_request_that_waits_too_long_in_the_worker_is_told_so(model_dir: Path) -> None:
    """QUEUE_TIMEOUT with the worker's limit, and no step."""
    worker = ONE_SEAT | {"max_queue_s": 0.2}
    async with fleet(model_dir, worker=worker) as running, running.client() as client:
        async with client.stream(**LONG) as first:
            await anext(first)
            with pytest.raises(LegatoError) as caught:
                await client.generate(token_ids=[5], max_tokens=2)
            assert caught.value.reason is Reason.QUEUE_TIMEOUT
            assert "0.2" in caught.value.message
        await running.until_idle()
