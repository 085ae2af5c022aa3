"""Clients that stop taking tokens: they hold their credit and no more, they are ended in the end,
and those who read do not notice (fault B064)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.client import Client
from legato.errors import LegatoError, Reason, from_rpc_error
from legato.v1 import inference_pb2 as pb
from legato_worker.runners.simulated import Fault, FaultKind

from tests.bystanders import bystanders
from tests.local_fleet import Fleet, fleet, until, with_faults
from tests.wire import Wire

pytestmark = pytest.mark.timeout(60)

# What a client must set to make the transport's own buffers small.
SMALL_BUFFERS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
LONG: dict[str, Any] = {"token_ids": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True}


def asked(number: int = 1, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[number, 2, 3]),
        max_tokens=4000,
        stop=pb.Stop(ignore_eos=True),
        **fields,
    )


def most_tokens(running: Fleet) -> int:
    """Tokens of the longest answer that a worker has computed so far."""
    owners = list(running.workers[0].engine._scheduler.table.requests.values())
    return max(
        (len(s.token_ids) - s.num_prompt for o in owners for s in list(o.sequences.values())),
        default=0,
    )


async def test_explicit_credit_is_obeyed_to_the_token(model_dir: Path) -> None:
    async with fleet(model_dir) as running, running.client() as client:
        for initial, grants in ((0, (1, 1, 5)), (3, (2, 300, 1)), (1, (1,) * 20), (500, (7,))):
            async with client.stream(**LONG, initial_credit=initial) as stream:
                assert await _take(stream, initial) == initial
                for grant in grants:
                    await stream.grant(grant)
                    assert await _take(stream, grant) == grant
        await running.until_idle()


async def _take(stream: Any, expected: int) -> int:
    """Tokens that come, waiting for at least the expected number, and a moment longer for more."""
    count = 0
    while True:
        try:
            async with asyncio.timeout(2.0 if count < expected else 0.03):
                count += len((await anext(stream)).ids)
        except TimeoutError:
            return count


async def test_credit_that_comes_while_the_request_is_being_placed(model_dir: Path) -> None:
    """A grant between Submit and Accepted is not lost: one at every moment of the opening."""
    async with fleet(model_dir) as running, running.stub() as stub:
        for microseconds in range(0, 6000, 100):
            call = stub.Generate()
            await call.write(pb.ClientFrame(request=asked(initial_credit=0)))
            await asyncio.sleep(microseconds / 1e6)
            await call.write(pb.ClientFrame(credit=pb.Credit(tokens=3)))
            count = 0
            async with asyncio.timeout(2):
                while count < 3:
                    frame: Any = await call.read()
                    count += len(frame.delta.ids)
            call.cancel()
        await running.until_idle()


async def test_credit_over_several_choices_ended_by_stop_strings(model_dir: Path) -> None:
    """What comes behind a stop string is paid by nobody: the other choices get all their credit."""
    fields: dict[str, Any] = {
        **LONG,
        "max_tokens": 200,
        "n": 8,
        "temperature": 1.0,
        "seed": 3,
        "stop": ["e", "t", "a", "o"],
    }
    async with fleet(model_dir) as running, running.client() as client:
        whole = await client.generate(**fields)
        assert {choice.finish_reason for choice in whole.choices} == {"stop_string"}
        async with client.stream(**fields, initial_credit=8) as stream:
            texts = [""] * 8
            async with asyncio.timeout(20):
                async for delta in stream:
                    texts[delta.choice] += delta.text
                    if delta.ids:
                        await stream.grant(len(delta.ids))
        assert texts == [choice.text for choice in whole.choices]
        await running.until_idle()


async def test_fifty_that_do_not_read_and_fifty_that_do(model_dir: Path) -> None:
    """The slow ones hold at most their window at the worker; the fast ones are not slowed, and the
    slow ones are ended after slow_reader_s."""
    worker = {"slow_reader_s": 1.0, "max_num_seqs": 110, "num_blocks": 8192}
    router = {"window_tokens": 32, "slow_reader_s": 1.0}
    async with fleet(model_dir, worker=worker, router=router) as running:
        target = f"127.0.0.1:{running.routers[0].port}"
        async with grpc.aio.insecure_channel(target, SMALL_BUFFERS) as channel:
            generate = channel.stream_stream(
                "/legato.v1.Inference/Generate",
                request_serializer=pb.ClientFrame.SerializeToString,
                response_deserializer=pb.ServerFrame.FromString,
            )
            slow = [generate() for _ in range(50)]
            for number, call in enumerate(slow, start=1):
                await call.write(pb.ClientFrame(request=asked(number)))
            await until(lambda: len(running.workers[0].engine._scheduler.table.running) == 50)
            await asyncio.sleep(0.3)
            async with Client(target) as client:
                fast = await asyncio.gather(
                    *(
                        client.generate(token_ids=[100 + i], max_tokens=100, ignore_eos=True)
                        for i in range(50)
                    )
                )
            assert all(len(answer.ids) == 100 for answer in fast)
            # The transport has swallowed some; the worker is no further ahead than the window.
            assert most_tokens(running) < 4000
            await running.until_idle(5.0)
            for call in slow:  # what was on its way still comes, and then why it ended
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert from_rpc_error(caught.value).reason is Reason.SLOW_READER


async def test_a_reader_without_credit_is_ended_and_told_why(model_dir: Path) -> None:
    async with fleet(model_dir, worker={"slow_reader_s": 0.3}) as running:
        async with running.client() as client, bystanders(running):
            for credit, n in ((0, 1), (5, 1), (2, 2)):
                stream = client.stream(**LONG, initial_credit=credit, n=n)
                with pytest.raises(LegatoError) as caught:
                    async for _ in stream:
                        pass
                assert caught.value.reason is Reason.SLOW_READER
                assert "0.3" in caught.value.message
        await running.until_idle()


async def test_a_slow_reader_that_reads_again_goes_on(model_dir: Path) -> None:
    async with (
        fleet(model_dir, worker={"slow_reader_s": 0.5}) as running,
        running.client() as client,
    ):
        fields = LONG | {"max_tokens": 30}
        whole = await client.generate(**fields)
        async with client.stream(**fields, initial_credit=10) as stream:
            ids: list[int] = []
            for grant in (10, 10, 0):
                await asyncio.sleep(0.3)
                while len(ids) % 10 or not ids or grant == 0:
                    try:
                        ids += (await anext(stream)).ids
                    except StopAsyncIteration:
                        break
                if grant:
                    await stream.grant(grant)
        assert tuple(ids) == whole.ids


async def test_a_cancel_while_the_write_is_blocked(model_dir: Path) -> None:
    """B098: the router hangs in its write to a client that reads nothing; the client leaves."""
    async with fleet(model_dir, router={"window_tokens": 16}) as running:
        target = f"127.0.0.1:{running.routers[0].port}"
        channel = grpc.aio.insecure_channel(target, SMALL_BUFFERS)
        generate = channel.stream_stream(
            "/legato.v1.Inference/Generate",
            request_serializer=pb.ClientFrame.SerializeToString,
            response_deserializer=pb.ServerFrame.FromString,
        )
        call = generate(iter([pb.ClientFrame(request=asked())]))
        starved = running.workers[0].engine._waits_for_readers
        await until(lambda: most_tokens(running) > 16 and starved())
        call.cancel()
        await running.until_idle(1.0)
        await channel.close()


@pytest.mark.parametrize("how", ["reset", "cable"])
async def test_a_connection_that_breaks_under_its_client(model_dir: Path, how: str) -> None:
    """B098: with a reset the request ends at once. A pulled cable tells nobody: the request stops
    at its window and is ended as one whose reader is slow."""
    worker = {"slow_reader_s": 0.3}
    router = {"window_tokens": 16, "slow_reader_s": 0.3}
    async with fleet(model_dir, worker=worker, router=router) as running:
        async with Wire(running.routers[0].port) as wire:
            channel = grpc.aio.insecure_channel(wire.address, SMALL_BUFFERS)
            generate = channel.stream_stream(
                "/legato.v1.Inference/Generate",
                request_serializer=pb.ClientFrame.SerializeToString,
                response_deserializer=pb.ServerFrame.FromString,
            )
            call = generate(iter([pb.ClientFrame(request=asked(initial_credit=100))]))
            await call.read()
            if how == "reset":
                wire.cut()
            else:
                wire.freeze()
            scheduler = running.workers[0].engine._scheduler
            await until(lambda: not scheduler.table.requests, 3.0)
            call.cancel()
            await channel.close()
        await until(lambda: not running.held(), 5.0)


async def test_a_slow_reader_does_not_make_its_worker_look_dead(model_dir: Path) -> None:
    """B094, B095: no step runs while the only reader takes nothing, and that is no stall."""
    worker = {"stall_s": 0.2, "slow_reader_s": 5.0}
    async with fleet(model_dir, worker=worker) as running, running.client() as client:
        async with client.stream(**LONG, initial_credit=0):
            engine = running.workers[0].engine
            await until(lambda: engine.busy and engine._waits_for_readers())
            for _ in range(20):
                await asyncio.sleep(0.03)
                assert engine.stalled_for_s() < 0.15
        await running.until_idle()


async def test_credit_does_not_leak_on_failing_mates(model_dir: Path) -> None:
    """Paced streams go on to their end although others fail inside their steps all the time."""
    load = with_faults(Fault(FaultKind.RAISE, token_id=300))
    async with fleet(model_dir, load=load) as running, running.client() as client:
        async with bystanders(running):
            for _ in range(10):
                with pytest.raises(LegatoError) as caught:
                    await client.generate(token_ids=[300], max_tokens=5)
                assert caught.value.reason is Reason.INTERNAL
        await running.until_idle()
