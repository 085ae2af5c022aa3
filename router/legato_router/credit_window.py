"""How many tokens a worker may run ahead of what a client has taken."""

from __future__ import annotations

UNLIMITED = 1 << 62


class CreditWindow:
    """Pure bookkeeping of one request: at most ``window`` tokens lie between worker and client, and
    none beyond what the client has granted (``client_credit`` None = it grants all).

    So memory for a slow reader is bounded (fault B064), and its pace reaches the scheduler. Call
    :meth:`open` for each attempt, and :meth:`due` whenever something has changed while the attempt
    can be reached; what is due is never lost in between.
    """

    __slots__ = ("_allowed", "_granted", "_taken", "_window")

    def __init__(self, window: int, client_credit: int | None) -> None:
        self._window = window
        self._allowed = UNLIMITED if client_credit is None else client_credit
        self._taken = 0
        self._granted = 0

    def open(self) -> int:
        """Credit for a new attempt; what an earlier one had is void."""
        self._granted = min(self._taken + self._window, self._allowed)
        return self._granted - self._taken

    def delivered(self, tokens: int) -> None:
        """``tokens`` were written to the client."""
        self._taken += tokens

    def dropped(self, tokens: int) -> None:
        """``tokens`` came behind the end of a choice: the worker spent credit on them, and the
        client is not to pay for what it never saw."""
        self._taken += tokens
        self._allowed += tokens

    def client_granted(self, tokens: int) -> None:
        self._allowed = min(UNLIMITED, self._allowed + tokens)

    def due(self) -> int:
        """What to grant the worker now; it counts as granted."""
        more = min(self._taken + self._window, self._allowed) - self._granted
        # Not each token is worth a frame: at least as much as the worker has left.
        if more > 0 and more >= self._granted - self._taken:
            self._granted += more
            return more
        return 0
