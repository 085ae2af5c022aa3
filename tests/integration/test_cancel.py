"""A client that leaves, or says that it will, in every state of its request: the worker stops
within a step, all is given back, and there is exactly one end. Faults B098, B038, B073."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.client import AnswerStream
from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2 as pb
from legato_router.client_call import ClientReader
from legato_router.worker_link import WorkerLink

from tests.bystanders import bystanders
from tests.local_fleet import Fleet, fleet, until

pytestmark = pytest.mark.timeout(60)

LONG: dict[str, Any] = {"token_ids": [1, 2, 3], "max_tokens": 3000, "ignore_eos": True}


def frame(**fields: Any) -> pb.ClientFrame:
    asked = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=fields.pop("ids", [1, 2, 3])),
        max_tokens=3000,
        stop=pb.Stop(ignore_eos=True),
        **fields,
    )
    return pb.ClientFrame(request=asked)


async def read(call: Any) -> pb.ServerFrame:
    """The next frame of a call that goes on."""
    got = await call.read()
    assert isinstance(got, pb.ServerFrame)
    return got


class Ends:
    """Counts the terminal events that the workers give, by request."""

    def __init__(self, running: Fleet) -> None:
        self.by_key: dict[tuple[int, int], int] = {}
        for number, worker in enumerate(running.workers):
            engine = worker.engine
            publish = engine._publish

            def record(update: Any, number: int = number, publish: Any = publish) -> None:
                for request in update.output.ended:
                    key = (number, request.key)
                    self.by_key[key] = self.by_key.get(key, 0) + 1
                publish(update)

            engine._publish = record

    def each_once(self, count: int) -> bool:
        return len(self.by_key) == count and set(self.by_key.values()) == {1}


async def _never() -> None:
    """A client that sends nothing after its request, and does not half-close."""
    await asyncio.Event().wait()


async def _open(first: pb.ClientFrame) -> AsyncIterator[pb.ClientFrame]:
    yield first
    await _never()


async def _before_its_first_frame(running: Fleet) -> Any:
    async with running.stub() as stub:
        call = stub.Generate()
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.sleep(0.02)


async def _after_half_close(running: Fleet) -> Any:
    async with running.stub() as stub:
        call = stub.Generate(iter([frame()]))
        while not (await read(call)).HasField("delta"):
            pass
        call.cancel()


async def _while_decoding(running: Fleet) -> Any:
    async with running.stub() as stub:
        call = stub.Generate(_open(frame()))
        while not (await read(call)).HasField("delta"):
            pass
        call.cancel()


async def _in_prefill(running: Fleet) -> Any:
    """A long prompt in chunks: cancelled between two of them."""
    async with running.stub() as stub:
        call = stub.Generate(_open(frame(ids=[5] * 5000)))
        scheduler = running.workers[0].engine._scheduler
        await until(lambda: any(0 < s.num_computed < 4000 for s in list(scheduler.table.running)))
        call.cancel()


async def _n_choices(running: Fleet) -> Any:
    async with running.stub() as stub:
        call = stub.Generate(_open(frame(n=4, sampling=pb.Sampling(temperature=1.0))))
        seen: set[int] = set()
        while len(seen) < 4:
            got = await read(call)
            if got.HasField("delta"):
                seen.add(got.delta.choice)
        call.cancel()


async def _waiting_for_credit(running: Fleet) -> Any:
    """Nothing moves: the client has granted nothing."""
    async with running.stub() as stub:
        call = stub.Generate(_open(frame(initial_credit=0)))
        assert (await read(call)).HasField("admitted")
        await asyncio.sleep(0.05)
        call.cancel()


async def _channel_closed(running: Fleet) -> Any:
    async with running.stub() as stub:
        call = stub.Generate(_open(frame()))
        while not (await read(call)).HasField("delta"):
            pass


async def _unary(running: Fleet) -> Any:
    async with running.stub() as stub:
        call = stub.GenerateOnce(frame().request)
        await until(lambda: running.num_steps() > 5)
        call.cancel()


@pytest.mark.parametrize(
    "leave",
    [
        *(_after_half_close, _while_decoding, _in_prefill, _n_choices, _waiting_for_credit),
        *(_channel_closed, _unary),
    ],
    ids=lambda leave: leave.__name__.strip("_"),
)
async def test_a_client_that_leaves_stops_the_worker_at_once(
    model_dir: Path, leave: Callable[[Fleet], Any]
) -> None:
    """B098: within a few milliseconds (steps of 2 ms), with one end, and nothing left."""
    worker = {"simulated_base_ms": 2.0, "max_num_batched_tokens": 256, "max_prefill_chunk": 64}
    async with fleet(model_dir, worker=worker) as running:
        ends = Ends(running)
        await leave(running)
        await running.until_idle(1.0)
        steps = running.num_steps()
        await asyncio.sleep(0.05)
        assert running.num_steps() == steps
        await until(lambda: ends.each_once(1), describe=lambda: str(ends.by_key))


async def test_leaving_before_the_request_was_sent(model_dir: Path) -> None:
    async with fleet(model_dir) as running:
        await _before_its_first_frame(running)
        await running.until_idle(1.0)


async def test_cancel_reaches_the_engine_within_a_step(model_dir: Path) -> None:
    """Steps that run after the router has heard of the cancel: the one in progress and one more,
    with steps far longer than the way to the worker."""
    async with fleet(model_dir, worker={"simulated_base_ms": 40.0}) as running:
        async with running.client() as client, client.stream(**LONG) as stream:
            for _ in range(3):
                await anext(stream)
            steps = running.num_steps()
            await stream.cancel()
            async for _ in stream:
                pass
            assert stream.finished is not None
            assert stream.finished.reason == pb.FINISH_REASON_CANCELLED
        await running.until_idle()
        assert running.num_steps() <= steps + 2


@pytest.mark.parametrize("by", ["frame", "rpc"])
async def test_queued_requests_are_cancelled_where_they_wait(model_dir: Path, by: str) -> None:
    """In the worker's queue, and in the router's: neither ever costs a step (B025)."""
    worker = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "simulated_base_ms": 2.0}
    async with fleet(model_dir, worker=worker) as running, running.client() as client:
        async with client.stream(**LONG) as first:
            await anext(first)
            waiting = [client.stream(token_ids=[9, i], max_tokens=10) for i in range(1, 20)]
            for stream in waiting:
                stream._start()
            scheduler, room = (
                running.workers[0].engine._scheduler,
                running.routers[0].service._dispatcher._room,
            )
            await until(lambda: len(scheduler.table.waiting) + len(room) == 19)
            assert len(scheduler.table.waiting) == 8
            results = await asyncio.gather(*(_end(stream, by) for stream in waiting))
            assert set(results) <= {Reason.CANCELLED, "cancelled"}
            await until(lambda: len(scheduler.table.waiting) + len(room) == 0, 1.0)
            assert len(scheduler.table.requests) == 1  # the first still runs
            await anext(first)
        await running.until_idle()


async def _end(stream: AnswerStream, by: str) -> object:
    if by == "rpc":
        await stream.aclose()
    else:
        await stream.cancel()
    try:
        async for _ in stream:
            pass
    except LegatoError as error:
        return error.reason
    return "cancelled"


async def test_choices_that_end_at_different_times_and_then_a_cancel(model_dir: Path) -> None:
    """B038: n = 4, two choices ended by a stop id, then a cancel: one end, maps empty."""
    async with fleet(model_dir, worker={"simulated_base_ms": 2.0}) as running:
        ends = Ends(running)
        async with running.client() as client:
            stream = client.stream(
                token_ids=[4],
                n=4,
                temperature=1.0,
                seed=1,
                max_tokens=3000,
                ignore_eos=True,
                stop_token_ids=list(range(1, 33)),
            )
            ended: dict[int, str] = {}
            async with stream:
                async for delta in stream:
                    if delta.finish_reason:
                        assert delta.choice not in ended
                        ended[delta.choice] = delta.finish_reason
                    if len(ended) == 2:
                        await stream.cancel()
            assert len(ended) == 4
            assert sorted(ended.values())[:2] == ["cancelled", "cancelled"]
            assert stream.finished is not None
            assert stream.finished.reason == pb.FINISH_REASON_CANCELLED
        await running.until_idle()
        assert ends.each_once(1)


async def test_a_cancel_frame_before_anything_else_was_done(model_dir: Path) -> None:
    """The request and its Cancel in one breath."""
    async with fleet(model_dir) as running, running.stub() as stub:
        for _ in range(20):
            call = stub.Generate(iter([frame(), pb.ClientFrame(cancel=pb.Cancel())]))
            frames: list[str | None] = []
            try:
                frames += [got.WhichOneof("frame") async for got in call]
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.CANCELLED
                assert "finished" not in frames
            else:
                assert frames.count("finished") == 1
        await running.until_idle()


async def test_a_hundred_cancels_leave_all_counters_at_zero(model_dir: Path) -> None:
    """B073: at random moments, before and after the first frame, by frame, by leaving and by
    deadline, on two workers and two routers, beside two streams that do not notice."""
    rng = random.Random(7)
    worker = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "simulated_base_ms": 1.0}
    async with fleet(model_dir, num_workers=2, num_routers=2, worker=worker) as running:
        async with running.client() as client, bystanders(running):

            async def one(number: int) -> None:
                fields = LONG | {"token_ids": [1 + number], "n": rng.choice([1, 1, 3])}
                stream = client.stream(**fields, timeout_s=rng.choice([None, 0.05]))
                await asyncio.sleep(rng.random() * 0.2)
                try:
                    async with stream:
                        for _ in range(rng.choice([0, 0, 1, 5])):
                            async with asyncio.timeout(rng.random() * 0.1):
                                await anext(stream)
                        if rng.random() < 0.5:
                            await stream.cancel()
                            async for _ in stream:
                                pass
                except (LegatoError, TimeoutError):
                    pass

            await asyncio.gather(*(one(number) for number in range(100)))
        await running.until_idle(5.0)
        for link in running.links():
            assert link.view is not None
            assert (link.view.unapplied_blocks, link.view.unapplied_tokens) == (0, 0)
            await until(partial(_empty, link), 2.0)  # B082


def _empty(link: WorkerLink) -> bool:
    return link.view is not None and link.view.snapshot.used_blocks == 0


async def test_no_read_of_a_client_is_ever_cancelled(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In grpc.aio each cancelled read leaks (grpc/grpc#43360): however a call ends, its reader ends
    by itself, and soon."""
    readers: list[ClientReader] = []
    create = ClientReader.__init__

    def record(self: ClientReader, frames: AsyncIterator[pb.ClientFrame]) -> None:
        create(self, frames)
        readers.append(self)

    monkeypatch.setattr(ClientReader, "__init__", record)
    async with fleet(model_dir) as running, running.client() as client, running.stub() as stub:
        for _ in range(3):
            await client.generate(token_ids=[1], max_tokens=2)
            async with client.stream(**LONG) as stream:  # leaves in mid-answer
                await anext(stream)
            async with client.stream(token_ids=[1], max_tokens=3) as stream:  # no half-close
                async for _ in stream:
                    pass
            with pytest.raises(LegatoError):
                await client.generate(token_ids=[1], max_tokens=2, n=99)
            call = stub.Generate(_open(frame()))
            await read(call)
            call.cancel()
        await until(lambda: all(reader._task.done() for reader in readers))
        assert len(readers) == 15
        assert not any(reader._task.cancelled() for reader in readers)
