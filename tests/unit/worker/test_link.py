"""RouterLink: order, and memory that a router which does not read cannot make grow (B064)."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, strategies as st
from legato.v1 import worker_pb2 as pb
from legato_worker.link import MAX_PENDING, RouterLink

pytestmark = pytest.mark.timeout(30)


def snapshot(step: int) -> pb.WorkerFrame:
    return pb.WorkerFrame(snapshot=pb.Snapshot(step=step))


async def drain(link: RouterLink) -> list[pb.WorkerFrame]:
    link.close()
    frames = []
    while (frame := await link.next_frame()) is not None:
        frames.append(frame)
    return frames


async def test_frames_leave_in_order_and_all_of_them_before_the_end() -> None:
    link = RouterLink("r", kv_events=False)
    reader = asyncio.create_task(link.next_frame())
    await asyncio.sleep(0)
    link.push(pb.WorkerFrame(pong=pb.Pong(id=1)))
    assert (await reader) == pb.WorkerFrame(pong=pb.Pong(id=1))
    for number in (2, 3):
        link.push(pb.WorkerFrame(pong=pb.Pong(id=number)))
    assert [frame.pong.id for frame in await drain(link)] == [2, 3]
    assert await link.next_frame() is None


async def test_of_snapshots_only_the_latest_waits() -> None:
    link = RouterLink("r", kv_events=False)
    for step in range(10_000):
        link.push(snapshot(step))
    link.push(pb.WorkerFrame(pong=pb.Pong(id=1)))
    link.push(snapshot(10_001))
    link.push(snapshot(10_002))
    frames = await drain(link)
    assert [frame.WhichOneof("frame") for frame in frames] == ["snapshot", "pong", "snapshot"]
    assert (frames[0].snapshot.step, frames[2].snapshot.step) == (9_999, 10_002)


async def test_hints_are_left_out_for_a_router_that_does_not_read() -> None:
    link = RouterLink("r", kv_events=True)
    for number in range(10 * MAX_PENDING):
        link.push_hint(pb.WorkerFrame(kv_events=pb.KvEvents(seq=number)))
    assert len(await drain(link)) == MAX_PENDING


@given(st.lists(st.one_of(st.just("refuse"), st.just("accept"), st.just("counters"))))
def test_applied_follows_the_counters_and_never_runs_ahead(events: list[str]) -> None:
    """last_applied_seq is that of the last decided Submit that the counters include; refused ones
    count when all before them do."""
    link = RouterLink("r", kv_events=False)
    key = applied = 0
    decided: list[tuple[int, int]] = []
    for seq, event in enumerate(events, start=1):
        match event:
            case "accept":
                key += 1
                decided.append((key, seq))
                link.decided(key, seq)
            case "refuse":
                decided.append((0, seq))
                link.decided(0, seq)
            case "counters":
                link.applied(key)
                while decided:
                    applied = decided.pop(0)[1]
        assert link.last_applied_seq == applied


def test_what_the_engine_has_not_taken_in_is_not_applied() -> None:
    link = RouterLink("r", kv_events=False)
    link.decided(1, 10)
    link.decided(2, 11)
    link.decided(0, 12)
    link.applied(1)
    assert link.last_applied_seq == 10
    link.applied(2)
    assert link.last_applied_seq == 12
