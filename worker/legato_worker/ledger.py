"""The worker's admission ledger: what it has promised, decided without waiting for the step."""

from __future__ import annotations

from legato.errors import LegatoError, Reason


class Ledger:
    """Owner of the promises to accepted requests. Lives on the gRPC side's event loop, so a router
    gets its answer while a step runs.

    A request is promised ``blocks`` when it is accepted and returns them when it ends. Promises may
    exceed the pool, since few answers reach their max_tokens; what bounds them is the number of
    requests: those that can run plus ``max_waiting``.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._max_requests = max_running + max_waiting
        self._promised: dict[int, int] = {}
        self.promised_blocks = 0

    def __len__(self) -> int:
        return len(self._promised)

    def reserve(self, key: int, blocks: int, retry_after_s: float) -> None:
        """Promises ``blocks`` to request ``key``. Raises QUEUE_FULL."""
        if len(self._promised) >= self._max_requests:
            raise LegatoError(
                Reason.QUEUE_FULL,
                f"the worker holds {len(self._promised)} requests, its limit",
                metadata={
                    "limit": str(self._max_requests),
                    "observed": str(len(self._promised)),
                },
                retry_after_s=retry_after_s,
            )
        self._promised[key] = blocks
        self.promised_blocks += blocks

    def release(self, key: int) -> None:
        """Takes the promise back; a second call for the same key does nothing."""
        self.promised_blocks -= self._promised.pop(key, 0)
