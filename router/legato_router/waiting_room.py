"""The router's bounded queue: requests bound to a worker only when one has room (late binding)."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from legato.errors import LegatoError, Reason

from .attempt import Attempt
from .validated import RequestClass
from .worker_link import WorkerLink

MAX_SCAN = 64
"""Requests without room for them, looked at in one go."""
RETRY_AFTER_S = 1.0

Placed = tuple[WorkerLink, Attempt]


@dataclass(slots=True, eq=False)
class _Waiter:
    order: tuple[int, int]
    num_tokens: int
    place: Callable[[], Placed | None]
    result: asyncio.Future[Placed]


class WaitingRoom:
    """Requests that no worker has room for right now, by class and then by arrival.

    Bounded in requests and in prompt tokens; whoever does not get in, or waits too long, is refused
    with a reason. Belongs to one event loop.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiters: list[_Waiter] = []
        self._num_tokens = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def arrival(self) -> int:
        """The next place in the order of arrivals, for one or more calls of :meth:`place`."""
        self._next += 1
        return self._next

    async def place(
        self,
        place: Callable[[], Placed | None],
        *,
        num_tokens: int,
        request_class: RequestClass,
        arrival: int,
        timeout_s: float,
    ) -> Placed:
        """Calls ``place`` until it gives a worker, at once and then on each :meth:`changed`.

        Raises QUEUE_FULL or QUEUE_TIMEOUT. Whoever waits is passed by later arrivals of its class
        only when they fit and it does not.
        """
        if not self._waiters and (placed := place()) is not None:
            return placed
        if len(self._waiters) >= self._max_requests:
            raise self._full("requests", self._max_requests, len(self._waiters))
        if self._num_tokens + num_tokens > self._max_tokens and self._waiters:
            raise self._full("prompt tokens", self._max_tokens, self._num_tokens + num_tokens)
        waiter = _Waiter(
            (int(request_class), arrival),
            num_tokens,
            place,
            asyncio.get_running_loop().create_future(),
        )
        insort(self._waiters, waiter, key=lambda w: w.order)
        self._num_tokens += num_tokens
        self.changed()
        try:
            await asyncio.wait((waiter.result,), timeout=timeout_s)
            if waiter.result.done():
                return waiter.result.result()
            raise LegatoError(
                Reason.QUEUE_TIMEOUT,
                "no worker had room in time",
                metadata={"limit": f"{timeout_s:.3f}"},
                retry_after_s=RETRY_AFTER_S,
            )
        except asyncio.CancelledError:
            if waiter.result.done() and waiter.result.exception() is None:
                link, attempt = waiter.result.result()
                link.abandon(attempt)  # placed in the very moment in which its caller left
            raise
        finally:
            self._waiters.remove(waiter)
            self._num_tokens -= num_tokens

    def changed(self) -> None:
        """Something ended or arrived: places whoever fits now, in order."""
        num_passed = 0
        for waiter in list(self._waiters):
            if waiter.result.done():
                continue
            try:
                placed = waiter.place()
            except Exception as error:  # its own failure: not that of whoever called
                waiter.result.set_exception(error)
                continue
            if placed is not None:
                waiter.result.set_result(placed)
                continue
            num_passed += 1
            if num_passed == MAX_SCAN:
                return

    def _full(self, what: str, limit: int, observed: int) -> LegatoError:
        return LegatoError(
            Reason.QUEUE_FULL,
            f"the queue is full: {observed} {what}, limit {limit}",
            metadata={"limit": str(limit), "observed": str(observed)},
            retry_after_s=RETRY_AFTER_S,
        )
