"""Whether a failed call is tried again, and after what pause. Decisions only: no waiting here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from .errors import DETAILS_KEY, LegatoError, Reason, invalid

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0

_TRANSPORT_CODES = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED}
)


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """The transport ended the call, not the router: no connection, a broken one, or a reset of the
    stream. (A cancel of our own is a CancelledError and no status.)"""
    typed = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    return not typed and error.code() in _TRANSPORT_CODES


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How long and how often one request is tried.

    ``timeout_s``: of the whole request, over all calls. ``max_resumes``: calls beyond the first
    that lost connections may cost. ``retry_for_s``: time since the start within which a refusal
    that names a retry time is obeyed; 0 = a refusal is raised at once.
    """

    timeout_s: float | None = None
    max_resumes: int = 3
    retry_for_s: float = 0.0

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise invalid("timeout_s", "must be above 0 and finite", observed=self.timeout_s)
        if not self.retry_for_s >= 0:
            raise invalid("retry_for_s", "must be 0 or more", observed=self.retry_for_s)
        if self.max_resumes < 0:
            raise invalid("max_resumes", "must be 0 or more", observed=self.max_resumes)


class Retries:
    """The tries of one request. Times are seconds on the caller's clock; ``random`` gives numbers
    in [0, 1). ``worthless_after_s``: when the answer has lost its worth (its objective's
    deadline); no try starts after it."""

    def __init__(
        self,
        limits: RetryLimits,
        *,
        start: float,
        random: Callable[[], float],
        worthless_after_s: float = math.inf,
    ) -> None:
        self._limits = limits
        self._start = start
        self._random = random
        self._timeout_s = math.inf if limits.timeout_s is None else limits.timeout_s
        self._end = start + min(self._timeout_s, worthless_after_s)
        self._num_pauses = 0
        self.num_resumes = 0

    def elapsed_s(self, now: float) -> float:
        """Time since the first try."""
        return now - self._start

    def timeout_s(self, now: float) -> float | None:
        """Time left for a call that starts now; None = no limit."""
        return None if math.isinf(self._timeout_s) else self._start + self._timeout_s - now

    def pause_s(
        self, error: LegatoError, *, lost: bool, continuing: bool, now: float
    ) -> float | None:
        """How long to wait before the next try; None = raise the error now.

        ``continuing``: part of the answer was admitted, so that a pass at the door (a busy or
        still empty router) is worth one of the resumes. A router that drains sends callers on to
        the next one. No pause ends after the deadline.
        """
        passing: bool = error.retry_after_s is not None or error.code is grpc.StatusCode.UNAVAILABLE
        if lost or error.reason is Reason.DRAINING or (continuing and passing):
            if self.num_resumes >= self._limits.max_resumes:
                return None
            resumes, end = 1, self._end
        elif error.retry_after_s is not None:
            resumes, end = 0, min(self._end, self._start + self._limits.retry_for_s)
        else:
            return None
        backoff_s = min(FIRST_PAUSE_S * 2**self._num_pauses, MAX_PAUSE_S)
        # The jitter keeps callers that were cut off together from coming back together.
        pause_s: float = (error.retry_after_s or 0.0) + backoff_s * (0.5 + 0.5 * self._random())
        if now + pause_s >= end:
            return None
        self.num_resumes += resumes
        self._num_pauses += 1
        return pause_s
