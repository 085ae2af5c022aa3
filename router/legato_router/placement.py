"""Which worker takes a request: filter, score in seconds, break near-ties alike on all routers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from .worker_view import Load, WorkerView

NEAR_TIE_SHARE = 0.05
NEAR_TIE_S = 0.010
MAX_UNEVENNESS = 2
"""Sequences by which affinity may fill one worker beyond the emptiest near-tie (faults B079, B080).
"""
COLD_PREFILL_TOKENS_PER_S = 1000.0
PRESSURE_S = 0.050
"""Seconds that a half-full KV pool is held to cost: the weight of k / (1 - k)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be chosen; ``name`` is its id, equal on all routers."""

    name: str
    view: WorkerView


def score_s(view: WorkerView, load: Load, cold_tokens_per_s: float) -> float:
    """Estimated seconds to the first token, plus the pressure on the KV pool; lower is better.

    Every rate is the worker's own; ``cold_tokens_per_s`` stands in until it has measured one.
    """
    tokens = view.snapshot.pending_prefill_tokens + view.unapplied_tokens + load.prompt_tokens
    occupancy = min(0.99, view.occupancy(load.blocks))
    seats_s = view.snapshot.decode_step_s * view.num_waiting
    rate = view.snapshot.prefill_tokens_per_s or cold_tokens_per_s
    return tokens / rate + seats_s + PRESSURE_S * occupancy / (1 - occupancy)


def cold_rate(views: Iterable[WorkerView]) -> float:
    """Prompt tokens per second that a worker without a measurement is given credit for: the best of
    its peers', lest the first to have measured draw all the load."""
    return max((view.snapshot.prefill_tokens_per_s for view in views), default=0) or (
        COLD_PREFILL_TOKENS_PER_S
    )


def choose(candidates: Iterable[Candidate], load: Load, affinity: bytes) -> Candidate | None:
    """The best candidate. Among near-ties the rendezvous hash of ``affinity`` (the session, or the
    prompt's beginning) decides, so equal prefixes meet on one worker without any shared state
    (Thaler and Ravishankar, 1998); but only while that leaves none much fuller than another."""
    candidates = list(candidates)
    if not candidates:
        return None
    cold = cold_rate(candidate.view for candidate in candidates)
    scored = [(score_s(candidate.view, load, cold), candidate) for candidate in candidates]
    best = min(score for score, _ in scored)
    limit = best + max(NEAR_TIE_S, NEAR_TIE_SHARE * best)
    near = [candidate for score, candidate in scored if score <= limit]
    fewest = min(candidate.view.num_sequences for candidate in near)
    even = [c for c in near if c.view.num_sequences < fewest + MAX_UNEVENNESS]
    return max(even, key=lambda candidate: _weight(affinity, candidate.name))


def _weight(affinity: bytes, name: str) -> bytes:
    return blake2b(affinity + b"\0" + name.encode(), digest_size=8).digest()
