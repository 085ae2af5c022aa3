"""WorkerLink against a scripted worker over a real connection: silence, nonsense, refusals, and its
own end. Nothing that a worker does may end the link's task."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import grpc
import pytest
from legato.v1 import worker_pb2 as pb, worker_pb2_grpc
from legato_router import worker_link
from legato_router.attempt import Accepted, Lost
from legato_router.worker_link import MAX_IDS_PER_FRAME, RouterIdentity, WorkerLink
from legato_router.worker_view import Load

from tests.local_fleet import until
from tests.scripted_link import spec

pytestmark = pytest.mark.timeout(30)

Answer = Callable[["ScriptedWorker", pb.RouterFrame], list[pb.WorkerFrame]]
WELCOME = pb.WorkerFrame(welcome=pb.Welcome(worker_id="w", model=spec()))


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Answers each frame as ``answer`` says, which raises EOFError to end the stream."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.frames: list[pb.RouterFrame] = []
        self.num_streams = 0
        self.refuse: grpc.StatusCode | None = None

    async def Attach(
        self, request_iterator: AsyncIterator[pb.RouterFrame], context: Any
    ) -> AsyncIterator[pb.WorkerFrame]:
        self.num_streams += 1
        if self.refuse is not None:
            await context.abort(self.refuse, "not you")
        async for frame in request_iterator:
            self.frames.append(frame)
            try:
                for reply in self.answer(self, frame):
                    yield reply
            except EOFError:
                return

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        raise NotImplementedError

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        raise NotImplementedError

    def kinds(self) -> list[str | None]:
        return [frame.WhichOneof("frame") for frame in self.frames]


def well(worker: ScriptedWorker, frame: pb.RouterFrame) -> list[pb.WorkerFrame]:
    """A healthy worker that accepts what it is sent."""
    match frame.WhichOneof("frame"):
        case "hello":
            return [WELCOME]
        case "ping":
            return [pb.WorkerFrame(pong=pb.Pong(id=frame.ping.id))]
        case "submit":
            return [pb.WorkerFrame(accepted=pb.Accepted(rid=frame.submit.rid))]
    return []


@contextlib.asynccontextmanager
async def attached(
    answer: Answer = well, refuse: grpc.StatusCode | None = None
) -> AsyncIterator[tuple[WorkerLink, ScriptedWorker, asyncio.Task[None]]]:
    worker = ScriptedWorker(answer)
    worker.refuse = refuse
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = WorkerLink(
        f"127.0.0.1:{port}",
        RouterIdentity("r0", "i0"),
        changed=lambda: None,
        clock=time.monotonic,
        random=Random(1),
    )
    task = asyncio.create_task(link.run())
    try:
        yield link, worker, task
        assert not task.done(), "the link's task has ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(2):
                await task
        await server.stop(None)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(worker_link, "MAX_SILENCE_S", 0.25)


@pytest.mark.usefixtures("impatient")
async def test_a_worker_that_falls_silent_is_lost_and_found_again() -> None:
    """The connection stands, and nothing comes: its requests hear of it, and the link goes on."""
    silent = False

    def answer(worker: ScriptedWorker, frame: pb.RouterFrame) -> list[pb.WorkerFrame]:
        return [] if silent else well(worker, frame)

    async with attached(answer) as (link, worker, _):
        await until(lambda: link.view is not None)
        attempt = link.submit(pb.Submit(), Load(1, 1))
        assert isinstance(await attempt.next_event(), Accepted)
        silent = True
        async with asyncio.timeout(2):
            event = await attempt.next_event()
        assert isinstance(event, Lost) and "0.25 s" in event.cause
        assert link.view is None and not link.num_attempts
        silent = False
        await until(lambda: link.view is not None)
        assert worker.num_streams > 1


@pytest.mark.usefixtures("impatient")
async def test_a_worker_that_never_says_a_word_does_not_hold_the_link() -> None:
    async with attached(lambda worker, frame: []) as (link, worker, _):
        await until(lambda: worker.num_streams >= 3)
        assert link.view is None


@pytest.mark.usefixtures("impatient")
async def test_a_loop_that_was_busy_does_not_blame_its_workers() -> None:
    """A second in which this process did nothing is no silence of the worker."""
    async with attached() as (link, worker, _):
        await until(lambda: link.view is not None)
        for _ in range(3):
            time.sleep(0.4)  # noqa: ASYNC251  # just this
            await asyncio.sleep(0.06)
        await asyncio.sleep(0.1)
        assert link.view is not None and worker.num_streams == 1


async def test_a_frame_without_sense_ends_the_link_and_not_the_router() -> None:
    """Columns of unequal length: what was open is lost, and the link comes back."""
    broken = True

    def answer(worker: ScriptedWorker, frame: pb.RouterFrame) -> list[pb.WorkerFrame]:
        if broken and frame.HasField("submit"):
            return [pb.WorkerFrame(step=pb.Step(rids=[frame.submit.rid], choices=[0, 1]))]
        return well(worker, frame)

    async with attached(answer) as (link, _, _):
        await until(lambda: link.view is not None)
        attempt = link.submit(pb.Submit(), Load(1, 1))
        event = await attempt.next_event()
        assert isinstance(event, Lost) and "ValueError" in event.cause
        broken = False
        await until(lambda: link.view is not None)
        again = link.submit(pb.Submit(), Load(1, 1))
        assert isinstance(await again.next_event(), Accepted)


async def test_a_worker_that_ends_the_stream_is_attached_again() -> None:
    def answer(worker: ScriptedWorker, frame: pb.RouterFrame) -> list[pb.WorkerFrame]:
        if frame.HasField("submit"):
            raise EOFError
        return well(worker, frame)

    async with attached(answer) as (link, worker, _):
        for _ in range(3):
            await until(lambda: link.view is not None)
            attempt = link.submit(pb.Submit(), Load(1, 1))
            event = await attempt.next_event()
            assert isinstance(event, Lost) and "closed" in event.cause
        assert worker.num_streams >= 3


async def test_a_worker_that_refuses_is_asked_ever_more_seldom() -> None:
    async with attached(refuse=grpc.StatusCode.INVALID_ARGUMENT) as (link, worker, _):
        await asyncio.sleep(1.0)
        assert link.view is None and 2 <= worker.num_streams <= 8
        worker.refuse = None
        await until(lambda: link.view is not None)


async def test_each_stream_opens_with_hello_and_numbers_go_on() -> None:
    """Request numbers are never used twice, over reconnects too (B074)."""
    async with attached() as (link, worker, _):
        await until(lambda: link.view is not None)
        first = link.submit(pb.Submit(), Load(1, 1))
        await first.next_event()
        worker.answer = lambda w, f: (_ for _ in ()).throw(EOFError())
        link.cancel(first)
        assert isinstance(await first.next_event(), Lost)
        worker.answer = well
        worker.frames.clear()
        await until(lambda: link.view is not None)
        second = link.submit(pb.Submit(), Load(1, 1))
        await second.next_event()
        assert second.rid > first.rid and second.seq > first.seq
        link.abandon(first)  # a late end of a request of the stream before: for nobody
        link.grant(first, 5)
        await asyncio.sleep(0.05)
        kinds = [kind for kind in worker.kinds() if kind != "ping"]
        assert kinds == ["hello", "submit"]
        assert worker.frames[0].hello.protocol_version == 1


async def test_long_prompts_travel_in_parts() -> None:
    ids = [i % 300 for i in range(2 * MAX_IDS_PER_FRAME + 5)]
    async with attached() as (link, worker, _):
        await until(lambda: link.view is not None)
        link.submit(pb.Submit(prompt_ids=ids, num_prompt_tokens=len(ids)), Load(1, 1))
        short = link.submit(pb.Submit(prompt_ids=[1], num_prompt_tokens=1), Load(1, 1))
        await short.next_event()
        sent = [f for f in worker.frames if f.WhichOneof("frame") in ("submit", "submit_part")]
        assert [f.WhichOneof("frame") for f in sent] == [
            *("submit", "submit_part", "submit_part", "submit"),
        ]
        assert sent[0].submit.num_prompt_tokens == len(ids)
        assert all(frame.ByteSize() <= 64 << 10 for frame in sent)
        got = [*sent[0].submit.prompt_ids]
        for frame in sent[1:3]:
            assert frame.submit_part.rid == sent[0].submit.rid
            got += frame.submit_part.prompt_ids
        assert got == ids


async def test_the_end_of_the_router_is_not_held_by_its_links() -> None:
    async with attached() as (link, _, running):
        await until(lambda: link.view is not None)
        task = asyncio.create_task(link.run())  # a second stream of the same link
        await asyncio.sleep(0.1)
        task.cancel()
        started = time.monotonic()
        await asyncio.wait([task], timeout=2)
        assert task.cancelled() and time.monotonic() - started < 0.5
        assert not running.done()
