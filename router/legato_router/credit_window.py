"""How many tokens a worker may run ahead of what a client has taken."""

from __future__ import annotations

UNLIMITED = 1 << 62


class CreditWindow:
    """Pure bookkeeping of one request: at most ``window`` tokens lie between worker and client, and
    none beyond what the client has granted (``client_credit`` None = it grants all).

    So memory for a slow reader is bounded (fault B064), and its pace reaches the scheduler.
    """

    __slots__ = ("_allowed", "_delivered", "_granted", "_window")

    def __init__(self, window: int, client_credit: int | None) -> None:
        self._window = window
        self._allowed = UNLIMITED if client_credit is None else client_credit
        self._delivered = 0
        self._granted = 0

    def open(self) -> int:
        """Credit for a new attempt; what an earlier one had is void."""
        self._granted = min(self._delivered + self._window, self._allowed)
        return self._granted - self._delivered

    def delivered(self, tokens: int) -> int:
        """``tokens`` were written to the client. Returns what to grant the worker now."""
        self._delivered += tokens
        return self._grant()

    def client_granted(self, tokens: int) -> int:
        """Returns what to grant the worker now."""
        self._allowed = min(UNLIMITED, self._allowed + tokens)
        return self._grant()

    def _grant(self) -> int:
        more = min(self._delivered + self._window, self._allowed) - self._granted
        # In halves of the window, so that not each token costs a frame; at once when it ran out.
        if more >= self._window // 2 or (more > 0 and self._granted <= self._delivered):
            self._granted += more
            return more
        return 0
