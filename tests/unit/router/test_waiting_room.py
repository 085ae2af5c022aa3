"""WaitingRoom: order, bounds, and callers that leave in the moment in which they are placed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from legato.errors import LegatoError, Reason
from legato_router.attempt import Attempt
from legato_router.validated import RequestClass
from legato_router.waiting_room import MAX_SCAN, Placed, WaitingRoom

pytestmark = pytest.mark.timeout(30)


class Seats:
    """Stands for workers: places while there are seats, and takes back what is abandoned."""

    def __init__(self, room: WaitingRoom, count: int = 0) -> None:
        self.room = room
        self.count = count
        self.placed: list[str] = []
        self.abandoned: list[str] = []

    def place(self, name: str, need: int = 1) -> Callable[[], Placed | None]:
        def place() -> Placed | None:
            if self.count < need:
                return None
            self.count -= need
            self.placed.append(name)
            return self, Attempt(len(self.placed), 1, name)  # type: ignore[return-value]

        return place

    def abandon(self, attempt: Attempt) -> None:
        self.abandoned.append(attempt.worker)
        self.count += 1
        self.room.changed()

    def free(self, count: int) -> None:
        self.count += count
        self.room.changed()


def room_and_seats(
    count: int = 0, *, max_requests: int = 100, max_tokens: int = 1000
) -> tuple[WaitingRoom, Seats]:
    room = WaitingRoom(max_requests=max_requests, max_tokens=max_tokens)
    return room, Seats(room, count)


def enter(
    room: WaitingRoom,
    seats: Seats,
    name: str,
    *,
    need: int = 1,
    num_tokens: int = 1,
    request_class: RequestClass = RequestClass.STANDARD,
    timeout_s: float = 5.0,
) -> asyncio.Task[Any]:
    return asyncio.create_task(
        room.place(
            seats.place(name, need),
            num_tokens=num_tokens,
            request_class=request_class,
            arrival=room.arrival(),
            timeout_s=timeout_s,
        )
    )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_in_order_of_class_and_arrival() -> None:
    room, seats = room_and_seats()
    tasks = [
        enter(room, seats, "batch", request_class=RequestClass.BATCH),
        enter(room, seats, "first"),
        enter(room, seats, "second"),
        enter(room, seats, "urgent", request_class=RequestClass.INTERACTIVE),
    ]
    await settle()
    assert len(room) == 4 and room.num_tokens == 4
    for _ in range(4):
        seats.free(1)
        await settle()
    assert seats.placed == ["urgent", "first", "second", "batch"]
    await asyncio.gather(*tasks)
    assert (len(room), room.num_tokens) == (0, 0)


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    room, seats = room_and_seats()
    waiting = enter(room, seats, "waits")
    await settle()
    seats.count = 1  # a seat that the room has not heard of yet
    newcomer = enter(room, seats, "newcomer")
    await settle()
    assert seats.placed == ["waits"]
    newcomer.cancel()
    await asyncio.gather(waiting, newcomer, return_exceptions=True)


async def test_small_ones_pass_a_big_one_that_does_not_fit() -> None:
    room, seats = room_and_seats()
    big = enter(room, seats, "big", need=5)
    small = enter(room, seats, "small")
    await settle()
    seats.free(1)
    await settle()
    assert seats.placed == ["small"]
    seats.free(5)
    await asyncio.gather(big, small)


async def test_bounds_refuse_with_limit_and_retry_time() -> None:
    room, seats = room_and_seats(max_requests=2, max_tokens=100)
    waiting = [enter(room, seats, "a", num_tokens=60), enter(room, seats, "b", num_tokens=30)]
    await settle()
    with pytest.raises(LegatoError) as full:
        await enter(room, seats, "c")
    assert full.value.reason is Reason.QUEUE_FULL and full.value.retry_after_s
    assert full.value.metadata["limit"] == "2"
    waiting.pop().cancel()
    await settle()
    with pytest.raises(LegatoError) as tokens:
        await enter(room, seats, "d", num_tokens=50)
    assert tokens.value.metadata == {"limit": "100", "observed": "110"}
    waiting.append(enter(room, seats, "e", num_tokens=40))
    await settle()
    assert (len(room), room.num_tokens) == (2, 100)
    seats.free(2)
    await asyncio.gather(*waiting)


async def test_one_that_is_larger_than_the_token_bound_may_wait_alone() -> None:
    room, seats = room_and_seats(max_tokens=10)
    alone = enter(room, seats, "large", num_tokens=50)
    await settle()
    assert len(room) == 1
    seats.free(1)
    await alone


async def test_no_queue_at_all() -> None:
    room, seats = room_and_seats(1, max_requests=0)
    await enter(room, seats, "a")
    with pytest.raises(LegatoError) as full:
        await enter(room, seats, "b")
    assert full.value.reason is Reason.QUEUE_FULL


async def test_a_wait_that_is_too_long_ends_with_a_reason() -> None:
    room, seats = room_and_seats()
    with pytest.raises(LegatoError) as late:
        await enter(room, seats, "a", timeout_s=0.02)
    assert late.value.reason is Reason.QUEUE_TIMEOUT and late.value.retry_after_s
    assert (len(room), room.num_tokens, seats.placed) == (0, 0, [])


async def test_one_whose_placing_fails_gets_its_error_and_the_others_go_on() -> None:
    room, seats = room_and_seats()

    def broken() -> Placed | None:
        if seats.count:
            raise ValueError("broken")
        return None

    bad = asyncio.create_task(
        room.place(
            broken,
            num_tokens=1,
            request_class=RequestClass.STANDARD,
            arrival=room.arrival(),
            timeout_s=5,
        )
    )
    good = enter(room, seats, "good")
    await settle()
    seats.free(1)
    await good
    with pytest.raises(ValueError, match="broken"):
        await bad


async def test_many_are_placed_at_once() -> None:
    """More than are looked at without success: those with room do not count against that."""
    room, seats = room_and_seats(max_requests=1000)
    tasks = [enter(room, seats, str(i)) for i in range(3 * MAX_SCAN)]
    await settle()
    seats.free(3 * MAX_SCAN)
    await asyncio.gather(*tasks)
    assert seats.placed == [str(i) for i in range(3 * MAX_SCAN)]


async def test_cancelled_in_the_moment_of_being_placed() -> None:
    """The future is done, the caller is cancelled before it runs again: the seat comes back."""
    room, seats = room_and_seats()
    first, second = enter(room, seats, "first"), enter(room, seats, "second")
    await settle()
    seats.free(1)
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert first.cancelled() and seats.abandoned == ["first"]
    assert seats.placed == ["first", "second"] and seats.count == 0


@given(st.lists(st.tuples(st.sampled_from(["enter", "cancel", "free", "turn"]), st.integers(0, 7))))
@settings(max_examples=150, deadline=None)
def test_no_seat_is_ever_lost(actions: list[tuple[str, int]]) -> None:
    """Whatever the order of arrivals, cancels and seats: seats given = seats placed and kept, and
    all who stay are placed when there are enough."""

    async def run() -> None:
        room, seats = room_and_seats()
        given_seats = 0
        tasks: list[asyncio.Task[Any]] = []
        for action, number in actions:
            match action:
                case "enter":
                    tasks.append(enter(room, seats, str(len(tasks))))
                case "cancel" if tasks:
                    tasks[number % len(tasks)].cancel()
                case "free":
                    given_seats += 1
                    seats.free(1)
                case "turn":
                    await asyncio.sleep(0)
        given_seats += len(tasks)
        seats.free(len(tasks))
        await asyncio.gather(*tasks, return_exceptions=True)
        kept = sum(1 for task in tasks if not task.cancelled())
        assert len(seats.placed) - len(seats.abandoned) == kept
        assert seats.count == given_seats - kept
        assert (len(room), room.num_tokens) == (0, 0)

    asyncio.run(run())
