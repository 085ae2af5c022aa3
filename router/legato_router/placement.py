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
PRESSURE_S = 0.050
"""Seconds that a half-full KV pool is held to cost: the weight of k / (1 - k)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be chosen; ``name`` is its id, equal on all routers."""

    name: str
    view: WorkerView


def score_s(view: WorkerView, load: Load) -> float:
    """Estimated seconds to the first token, plus the pressure on the KV pool; lower is better.

    Every rate is the worker's own.
    """
    tokens = view.snapshot.pending_prefill_tokens + view.unapplied_tokens + load.prompt_tokens
    occupancy = min(0.99, view.occupancy(load.blocks))
    seats_s = view.snapshot.decode_step_s * view.num_waiting
    return tokens / view.prefill_tokens_per_s + seats_s + PRESSURE_S * occupancy / (1 - occupancy)


def choose(candidates: Iterable[Candidate], load: Load, affinity: bytes) -> Candidate | None:
    """The best candidate. Among near-ties the rendezvous hash of ``affinity`` (the session, or the
    prompt's beginning) decides, so equal prefixes meet on one worker without any shared state
    (Thaler and Ravishankar, 1998); but only while that leaves none much fuller than another."""
    scored = [(score_s(candidate.view, load), candidate) for candidate in candidates]
    if not scored:
        return None
    best = min(score for score, _ in scored)
    limit = best + max(NEAR_TIE_S, NEAR_TIE_SHARE * best)
    near = [candidate for score, candidate in scored if score <= limit]
    fewest = min(candidate.view.num_sequences for candidate in near)
    even = [c for c in near if c.view.num_sequences < fewest + MAX_UNEVENNESS]
    return max(even, key=lambda candidate: _weight(affinity, candidate.name))


def _weight(affinity: bytes, name: str) -> bytes:
    return blake2b(affinity + b"\0" + name.encode(), digest_size=8).digest()
