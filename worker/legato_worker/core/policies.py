"""Capacity and batching: two decisions, kept apart (as TensorRT-LLM's scheduler separates them).

A capacity policy says whether a sequence may take KV now; a batching policy says whether the
running set may grow now. Both are stateless and see numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Demand:
    """What admitting one sequence would mean, in blocks.

    ``now``: taken from the available ones at once. ``worst``: taken over its whole life.
    ``available``: free or evictable. ``outstanding``: what the running ones may still come to
    take. ``num_blocks``: the whole pool. ``idle``: nothing runs.
    """

    now: int
    worst: int
    available: int
    outstanding: int
    num_blocks: int
    idle: bool


class CapacityPolicy(Protocol):
    def admits(self, demand: Demand) -> bool: ...


@dataclass(frozen=True, slots=True)
class OnDemand:
    """Take what is known to be needed, preempt and recompute when it runs out (vLLM;
    TensorRT-LLM's MAX_UTILIZATION). A watermark keeps a part of the pool for growth."""

    watermark: float = 0.01

    def admits(self, demand: Demand) -> bool:
        spare = 0 if demand.idle else max(1, int(self.watermark * demand.num_blocks))
        return demand.now + spare <= demand.available


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take prompt plus max_tokens up front, so that nothing is ever preempted (Orca, TGI,
    TensorRT-LLM's GUARANTEED_NO_EVICT)."""

    def admits(self, demand: Demand) -> bool:
        return demand.worst + demand.outstanding <= demand.available


class BatchingPolicy(Protocol):
    def may_admit(self, num_running: int) -> bool:
        """Asked once per step, before the first admission."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    """The running set is re-formed at every iteration (Orca, section 3.1)."""

    def may_admit(self, num_running: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Static:
    """A group is formed from what waits and runs to its end; then comes the next (request-level
    batching, the baseline of Orca's figure 3)."""

    def may_admit(self, num_running: int) -> bool:
        return num_running == 0
