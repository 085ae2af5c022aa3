"""CreditWindow against a model of a worker and a client that see nothing but its numbers (B064)."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from legato_router.credit_window import CreditWindow

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(1, 50)),
        st.tuples(st.just("take"), st.integers(1, 50)),
        st.tuples(st.just("drop"), st.integers(1, 5)),
        st.tuples(st.just("grant"), st.integers(0, 40)),
        st.tuples(st.just("move"), st.just(0)),
    ),
    max_size=80,
)


class Wire:
    """A worker that produces all it may, a queue, and a client with its own books."""

    def __init__(self, window: int, credit: int | None) -> None:
        self.window, self.credit = window, credit
        self.books = CreditWindow(window, credit)
        self.queued = self.received = 0
        self.client_granted = credit or 0
        self.at_worker = self.books.open()
        self.due = 0

    def pump(self) -> None:
        more = self.books.due()
        assert more >= 0
        self.at_worker += more

    def step(self, kind: str, number: int) -> None:
        match kind:
            case "produce":
                count = min(number, self.at_worker)
                self.at_worker -= count
                self.queued += count
            case "take":
                count = min(number, self.queued)
                self.queued -= count
                self.received += count
                self.books.delivered(count)
            case "drop":
                count = min(number, self.queued)
                self.queued -= count
                self.books.dropped(count)
            case "grant" if self.credit is not None:
                self.client_granted += number
                self.books.client_granted(number)
            case "move":  # the worker is lost with what it had; what was queued is drained first
                self.received += self.queued
                self.books.delivered(self.queued)
                self.queued = 0
                self.at_worker = self.books.open()
        self.pump()
        assert self.queued + self.at_worker <= self.window
        if self.credit is not None:
            assert self.received <= self.client_granted

    def drain(self) -> None:
        """Everybody does all that they may, until nothing moves."""
        while self.at_worker or self.queued:
            self.step("produce", 1 << 30)
            if self.credit is None and self.received > 10_000:
                return
            self.step("take", 1 << 30)


@given(st.integers(1, 64), st.one_of(st.none(), st.integers(0, 100)), STEPS)
@settings(max_examples=300, deadline=None)
def test_never_more_than_the_window_nor_less_than_the_client_granted(
    window: int, credit: int | None, steps: list[tuple[str, int]]
) -> None:
    """At each moment at most the window lies between worker and client, the client never gets more
    than it granted; and in the end it gets exactly that: nothing granted is lost, dropped tokens
    are paid by nobody, and an unpaced answer never stands still."""
    wire = Wire(window, credit)
    for kind, number in steps:
        wire.step(kind, number)
    wire.drain()
    if credit is None:
        assert wire.received > 10_000
    else:
        assert wire.received == wire.client_granted


@given(st.integers(1, 512), st.integers(1, 16))
def test_grants_are_few(window: int, chunk: int) -> None:
    """Of an unpaced answer about two grants per window, not one per token."""
    books = CreditWindow(window, None)
    at_worker, grants, tokens = books.open(), 0, 0
    while tokens < 10 * window:
        count = min(chunk, at_worker)
        at_worker -= count
        tokens += count
        books.delivered(count)
        more = books.due()
        grants += more > 0
        at_worker += more
        assert at_worker > 0
    assert grants <= 2 * (tokens / window) + 12


def test_what_the_client_grants_while_nobody_can_be_told_is_due_later() -> None:
    """Between Submit and Accepted there is nobody to grant to: due() is simply asked later."""
    books = CreditWindow(256, 0)
    assert books.open() == 0
    books.client_granted(3)
    books.client_granted(4)
    assert books.due() == 7
    assert books.due() == 0
