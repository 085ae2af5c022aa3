"""Decides each step: which rows, how many tokens of each, who gets KV and who loses it.

There is no prefill phase and no decode phase. Each sequence's ``num_computed`` chases its
``num_tokens``; a step hands out a token budget, decoding rows first (the note that opens vLLM's
``schedule()``; chunked prefill as in Sarathi-Serve). New prompts, chunks, prefix hits, resumed
answers and recompute after preemption are this one path.

Progress: running sequences are served in a fixed total order (rank), and one may take KV only from
those behind it. So the first always advances, and everything ends (fault B016). A sequence that was
preempted ``max_preemptions`` times comes back only with its worst case covered, ahead of all
others: that bounds the preemptions of each.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from legato.capacity import blocks_needed

from .admission import Admission
from .batch import ScheduledBatch, StepResult, TableUpdate
from .config import SchedulerConfig
from .kv_cache import KVCacheManager
from .output import Counters, EndCause, StepOutput
from .preemption import choose_victims
from .request import FinishReason, Request
from .request_table import RequestTable
from .results import take_result
from .sequence import Sequence, State
from .step import Step


class DecisionSink(Protocol):
    """Where the scheduler's inputs and decisions go, in order (see ``decision_log``)."""

    def added(self, request: Request) -> None: ...

    def cancelled(self, now: float, key: int, choice: int | None) -> None: ...

    def granted(self, key: int, tokens: int) -> None: ...

    def scheduled(self, now: float, batch: ScheduledBatch | None) -> None: ...

    def committed(self, now: float, result: StepResult) -> None: ...


class Scheduler:
    """Called from one thread; reads no clock.

    ``schedule`` gives the next batch; ``commit`` takes the result of the oldest batch. With
    in-flight depth 1, ``schedule`` is called once more before that ``commit``. ``take_output``
    returns what happened since it was last called.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, log: DecisionSink | None = None
    ) -> None:
        self.config = config
        self.kv = kv
        self.table = RequestTable(config, kv)
        self.step = 0
        self.num_recomputed_tokens = 0
        self._admission = Admission(config, kv)
        self._in_flight: deque[Step] = deque()
        self._log = log

    # -- inputs --------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a validated request that ``fits``."""
        if self._log:
            self._log.added(request)
        self.table.add(request)

    def cancel(self, key: int, now: float, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, in whatever state it is. Unknown keys are ignored:
        the request may just have ended."""
        if self._log:
            self._log.cancelled(now, key, choice)
        owner = self.table.requests.get(key)
        if owner is None:
            return
        if choice is None:
            self.table.end_request(owner, FinishReason.CANCELLED, now)
        elif choice in owner.sequences and not owner.sequences[choice].num_waiting_forks:
            self.table.end_choice(owner.sequences[choice], FinishReason.CANCELLED, now)

    def grant(self, key: int, tokens: int) -> None:
        """Lets ``tokens`` more ids of a request be delivered."""
        if self._log:
            self._log.granted(key, tokens)
        owner = self.table.requests.get(key)
        if owner is not None:
            owner.add_credit(tokens)

    def end_all(self, cause: EndCause, message: str, now: float) -> None:
        """Ends every request, as a drain deadline or a dead runner demands."""
        for owner in list(self.table.requests.values()):
            self.table.end_request(owner, FinishReason.CANCELLED, now, cause, message)

    # -- one step ------------------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledBatch | None:
        """The next step's batch, or None when no row can run."""
        table, config = self.table, self.config
        table.expire(now)
        step = Step(self.step + 1)
        budget = config.max_num_batched_tokens
        preemptions = table.num_preemptions
        prefills = []
        for sequence in list(table.running):
            if sequence.state is not State.RUNNING:
                continue  # lost its KV to one before it
            if len(sequence.token_ids) + sequence.num_in_flight - sequence.num_computed > 1:
                prefills.append(sequence)
            elif self._decode(step, sequence, now):
                budget -= 1
        for sequence in prefills:
            if sequence.state is State.RUNNING and budget > 0:
                budget -= self._compute(step, sequence, budget, now)
        # Who just lost KV goes first when there is some again.
        quiet = table.num_preemptions == preemptions
        if quiet and budget > 0 and table.waiting and config.batching.may_admit(len(table.running)):
            self._admit(step, budget, now)
        if self._log:
            self._log.scheduled(now, step.batch if step.rows else None)
        if not step.rows:
            if not self._in_flight:
                table.evict_slow_readers(now)
            return None
        self.step += 1
        self._in_flight.append(step)
        return step.batch

    def commit(self, result: StepResult, now: float) -> None:
        """Takes the result of the oldest step in flight into the sequences."""
        if self._log:
            self._log.committed(now, result)
        take_result(self._in_flight.popleft(), result, now, self.table, self.kv, self.config)

    def take_output(self) -> StepOutput:
        output, self.table.output = self.table.output, StepOutput(self.step)
        return output

    # -- views ---------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Launched steps whose result is still to come."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self.table.requests or self._in_flight)

    def fits(self, num_prompt: int, max_tokens: int, n: int) -> bool:
        """Whether such a request can ever run here."""
        needed = blocks_needed(num_prompt, max_tokens, n, self.kv.block_size)
        return needed <= self.kv.pool.num_blocks and n <= self.config.max_num_seqs

    def counters(self) -> Counters:
        pool, table = self.kv.pool, self.table
        pending = sum(len(sequence.token_ids) for sequence in table.waiting)
        context = 0
        for sequence in table.running:
            remaining = sequence.num_tokens - sequence.num_computed
            pending += remaining if remaining > 1 else 0
            context += sequence.num_computed
        return Counters(
            step=self.step,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            running=len(table.running),
            waiting=len(table.waiting),
            pending_prefill_tokens=pending,
            decode_context_tokens=context,
            preemptions=table.num_preemptions,
            recomputed_tokens=self.num_recomputed_tokens,
            prefix_queried_tokens=self._admission.num_queried_tokens,
            prefix_hit_tokens=self._admission.num_hit_tokens,
        )

    def check(self) -> None:
        """Raises AssertionError unless all bookkeeping agrees."""
        self.table.check(in_flight=bool(self._in_flight))

    # -- scheduling, in parts ------------------------------------------------------------------

    def _decode(self, step: Step, sequence: Sequence, now: float) -> bool:
        """Adds the row of a sequence that lacks its last token only, if anything lets it run."""
        if len(sequence.token_ids) + sequence.num_in_flight >= sequence.max_num_tokens:
            return False  # the last id is in flight
        if not self._has_credit(sequence, now):
            return False
        if not self.kv.is_writable(sequence) and not self._make_writable(sequence, step.batch):
            return False
        step.add_decode(sequence)
        if sequence.num_waiting_forks:
            self._fork(step, sequence)
        return True

    def _compute(self, step: Step, sequence: Sequence, budget: int, now: float) -> int:
        """Adds a chunk of a sequence that lacks more; returns its number of tokens, 0 if none."""
        missing = sequence.num_tokens - sequence.num_computed
        count = min(missing, budget, self.config.max_prefill_chunk)
        if count == missing and not self._has_credit(sequence, now):
            return 0
        if step.add_chunk(sequence, count) and sequence.num_waiting_forks:
            self._fork(step, sequence)
        return count

    def _has_credit(self, sequence: Sequence, now: float) -> bool:
        """Whether the ids that this sequence is about to sample may be delivered."""
        owner = sequence.owner
        if owner.credit > sequence.num_waiting_forks:
            return True
        self.table.starve(owner, now)
        return False

    def _make_writable(self, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """Gets the block that the next position needs; False = this row waits a step."""
        kv = self.kv
        if kv.pool.num_available < 1:
            if kv.num_fenced:
                return False  # comes back when the running step ends: wait, evict nobody
            candidates = [
                other
                for other in self.table.running
                if other is not sequence
                and other.last_step != batch.step  # not a row of this very batch
                and (other.yields_to(sequence) or other.owner.starved_since_s is not None)
            ]
            for victim in choose_victims(candidates, 1, kv.pool.references) or ():
                self.table.preempt(victim)
        update = kv.append(sequence, batch.step)
        if update is None:
            return False  # nothing to take, or the victims' blocks are fenced
        index, block_id, source = update
        batch.table_updates.append(TableUpdate(sequence.slot, index, (block_id,)))
        if source >= 0:
            batch.copies.append((source, block_id))
        return True

    def _fork(self, step: Step, leader: Sequence) -> None:
        """The prompt is computed in this step: the other choices start here, on shared blocks."""
        owner, row = leader.owner, len(step.rows) - 1
        for choice in range(1, owner.request.n):
            fork = Sequence(owner, choice, list(leader.token_ids))
            owner.sequences[choice] = fork
            self.kv.fork(leader, fork)
            self.table.start(fork)
            step.attach(fork)
            fork.last_step = step.batch.step
            step.add_sample(fork, row)
        leader.num_waiting_forks = 0

    def _admit(self, step: Step, budget: int, now: float) -> None:
        table = self.table
        seats = len(table.free_slots) - sum(s.num_waiting_forks for s in table.running)
        if seats < 1 or not self.kv.pool.num_available:
            return
        admitted = []
        for sequence, matched in self._admission.candidates(table.waiting, table.running):
            owner, need = sequence.owner, 1 + sequence.num_waiting_forks
            if need > seats or budget < 1:
                break
            if not self._has_credit(sequence, now):
                continue
            if not self.kv.admit(sequence, matched):
                break
            seats -= need
            admitted.append(sequence)
            self._admission.admitted(sequence)
            recomputed = max(0, sequence.max_computed - sequence.num_computed)
            owner.recomputed_tokens += recomputed
            self.num_recomputed_tokens += recomputed
            if owner.first_step_s is None:
                owner.first_step_s = now
                owner.cached_tokens = sequence.num_computed
            table.start(sequence)
            step.attach(sequence)
            budget -= self._compute(step, sequence, budget, now)
        for sequence in admitted:
            table.waiting.remove(sequence)
