"""Pure bookkeeping of the router under random sequences of events."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings, strategies as st
from legato.errors import LegatoError, Reason
from legato.v1 import worker_pb2 as pb
from legato_router.credit_window import CreditWindow
from legato_router.validated import RequestClass
from legato_router.waiting_room import WaitingRoom
from legato_router.worker_view import Load, WorkerView

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 40)),
        st.tuples(st.just("grant"), st.integers(1, 60)),
        st.tuples(st.just("drop"), st.integers(1, 5)),
        st.tuples(st.just("move"), st.just(0)),
    ),
    max_size=60,
)


@given(window=st.integers(1, 64), client=st.none() | st.integers(0, 50), events=EVENTS)
def test_credit_is_exact(window: int, client: int | None, events: list[tuple[str, int]]) -> None:
    """A worker never holds credit beyond the window or the client's grants, and whenever it has
    none left although both leave some, it is granted some: nothing is lost, nothing stalls."""
    credit = CreditWindow(window, client)
    allowed = float("inf") if client is None else client
    taken, worker = 0, credit.open()
    for kind, number in events:
        if kind == "take":
            number = min(number, worker)
            worker -= number
            taken += number
            credit.delivered(number)
        elif kind == "drop":
            number = min(number, worker)
            worker -= number
            taken += number
            allowed += number
            credit.dropped(number)
        elif kind == "grant":
            allowed += number
            credit.client_granted(number)
        else:
            worker = credit.open()
        worker += credit.due()
        assert 0 <= worker <= window
        assert taken + worker <= allowed
        if worker == 0:
            assert taken >= allowed, "the worker was left without credit"


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 9)),
            st.tuples(st.just("settle"), st.integers(0, 30)),
            st.tuples(st.just("snapshot"), st.integers(0, 30)),
        ),
        max_size=60,
    )
)
def test_a_view_counts_each_own_submit_until_the_worker_does(steps: list[tuple[str, int]]) -> None:
    """B073, B074, B080: sums equal what is unapplied, never below zero, late settles do nothing."""
    view = WorkerView(pb.ModelSpec(num_blocks=100, max_num_seqs=4), pb.Snapshot())
    model: dict[int, int] = {}
    seq = applied = 0
    for kind, number in steps:
        if kind == "submit":
            seq += 1
            view.submitted(seq, Load(number, 2 * number))
            model[seq] = number
        elif kind == "settle":
            view.settle(number)
            model.pop(number, None)
        else:
            applied = max(applied, min(number, seq))
            view.update(pb.Snapshot(last_applied_seq=applied, used_blocks=3))
            model = {s: blocks for s, blocks in model.items() if s > applied}
        assert dict.fromkeys(view.unapplied) == dict.fromkeys(model)
        assert view.unapplied_blocks == sum(model.values()) >= 0
        assert view.unapplied_tokens == 2 * sum(model.values())


class _Link:
    """Counts what it is told to forget."""

    def __init__(self) -> None:
        self.abandoned = 0

    def abandon(self, attempt: object) -> None:
        self.abandoned += 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
async def test_a_waiting_room_neither_leaks_nor_loses(seed: int) -> None:
    """Callers that leave at any moment, seats that come at any moment: every placement is either
    held by a caller or given back, and the room is empty in the end."""
    draw = random.Random(seed)
    room, link = WaitingRoom(max_requests=8, max_tokens=100), _Link()
    seats = placements = 0

    def place() -> tuple[_Link, object] | None:
        nonlocal seats, placements
        if not seats:
            return None
        seats -= 1
        placements += 1
        return link, object()

    async def caller() -> bool:
        await room.place(
            place,  # type: ignore[arg-type]
            num_tokens=draw.randint(1, 30),
            request_class=draw.choice(list(RequestClass)),
            arrival=room.arrival(),
            timeout_s=0.05,
        )
        return True

    tasks = []
    for _ in range(20):
        tasks.append(asyncio.create_task(caller()))
        if draw.random() < 0.5:
            await asyncio.sleep(0)
        if draw.random() < 0.4:
            seats += draw.randint(1, 3)
            room.changed()
        if draw.random() < 0.4:
            draw.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    held = sum(result is True for result in results)
    assert placements == held + link.abandoned
    assert len(room) == 0 and room.num_tokens == 0
    for result in results:
        if isinstance(result, LegatoError):
            assert result.reason in (Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT)
        else:
            assert result is True or isinstance(result, asyncio.CancelledError)


async def test_the_more_urgent_class_is_placed_first() -> None:
    room, link, order = WaitingRoom(max_requests=8, max_tokens=100), _Link(), []
    opened = False

    async def caller(request_class: RequestClass) -> None:
        def place() -> tuple[_Link, object] | None:
            return (link, object()) if opened and not order.append(request_class) else None

        await room.place(
            place,  # type: ignore[arg-type]
            num_tokens=1,
            request_class=request_class,
            arrival=room.arrival(),
            timeout_s=5.0,
        )

    tasks = [asyncio.create_task(caller(c)) for c in reversed(RequestClass)]
    await asyncio.sleep(0)
    opened = True
    room.changed()
    await asyncio.gather(*tasks)
    assert order == sorted(order) and len(order) == 3


def test_a_full_room_says_so() -> None:
    async def run() -> None:
        room = WaitingRoom(max_requests=0, max_tokens=10)
        with pytest.raises(LegatoError) as caught:
            await room.place(
                lambda: None,
                num_tokens=1,
                request_class=RequestClass.STANDARD,
                arrival=room.arrival(),
                timeout_s=1.0,
            )
        assert caught.value.reason is Reason.QUEUE_FULL
        assert caught.value.metadata["limit"] == "0" and caught.value.retry_after_s

    asyncio.run(run())
