"""Which waiting sequences may take KV now, and in which order."""

from __future__ import annotations

from collections.abc import Iterator

from legato.capacity import blocks_needed

from .config import SchedulerConfig
from .kv_cache import KVCacheManager
from .policies import Demand
from .sequence import RequestState, Sequence, State
from .waiting import WaitingQueue

MAX_SCAN = 16
"""Sequences that do not fit, looked at in one step."""


class Admission:
    """Asks the capacity policy, sequence by sequence. Holds counters only."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._blocked: RequestState | None = None  # the first that did not fit in this step

    def candidates(
        self, waiting: WaitingQueue, running: list[Sequence]
    ) -> Iterator[tuple[Sequence, list[int]]]:
        """Admissible sequences with their matched prefix blocks. The caller admits each one before
        it asks for the next, or stops; it changes the queue only after the last.

        The first that does not fit may be passed by ``max_bypass`` others in all; after that nobody
        passes it, and what ends makes room for it (fault B019).
        """
        self._blocked, scanned = None, 0
        outstanding = sum(self._outstanding(s) for s in running)
        for sequence in waiting:
            if sequence.num_in_flight or sequence.owner.starved_since_s is not None:
                continue
            if self._blocked and self._blocked.bypassed >= self._config.max_bypass:
                return
            matched = self._kv.match_prefix(sequence)
            if self._kv.computing_next_block(sequence, len(matched)):
                continue
            if self._admits(sequence, matched, running, outstanding):
                yield sequence, matched
                if sequence.state is State.RUNNING:
                    outstanding += self._outstanding(sequence)
                continue
            self._blocked = self._blocked or sequence.owner
            scanned += 1
            if scanned == MAX_SCAN:
                return

    def admitted(self, sequence: Sequence) -> None:
        """Counts that the blocked one was passed, and a prefix query once, when its sequence is
        scheduled (fault B107); recompute after preemption is not a query."""
        if self._blocked:
            self._blocked.bypassed += 1
        if not sequence.max_computed:
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_hit_tokens += sequence.num_computed

    def worst_case(self, sequence: Sequence) -> int:
        """Blocks that the sequence and the choices forked from it may hold in the end."""
        request, size = sequence.owner.request, self._kv.block_size
        choices = 1 + sequence.num_waiting_forks
        return blocks_needed(len(request.prompt_ids), request.max_tokens, choices, size)

    def _admits(
        self, sequence: Sequence, matched: list[int], running: list[Sequence], outstanding: int
    ) -> bool:
        pool = self._kv.pool
        new, idle = self._kv.num_missing(matched, len(sequence.token_ids))
        if new + idle > pool.num_available:
            return False
        worst = self.worst_case(sequence)
        if sequence.rank[0] == 0:
            protected = sum(self.worst_case(s) for s in running if s.rank[0] == 0)
            return protected + worst <= pool.num_blocks
        shared = len(matched) - idle
        demand = Demand(
            now=new + idle,
            worst=worst - shared,
            available=pool.num_available,
            outstanding=outstanding,
            num_blocks=pool.num_blocks,
            idle=not running,
        )
        return self._config.capacity.admits(demand)

    def _outstanding(self, sequence: Sequence) -> int:
        """Blocks that a running sequence may still take, a copy of a shared last one included."""
        held = len(sequence.block_ids)
        last_shared = held and self._kv.pool.references[sequence.block_ids[-1]] > 1
        return max(0, self.worst_case(sequence) - held) + int(bool(last_shared))
