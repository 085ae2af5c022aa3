"""All requests of a worker, from arrival to their one terminal event, in whatever state they are.

Everything that starts, pauses or ends a request goes through here, so that slots, blocks, queue
entries and the terminal event can never disagree.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from .config import SchedulerConfig
from .kv_cache import KVCacheManager
from .output import EndCause, EndedChoice, EndedRequest, StepOutput
from .request import FinishReason, Request, RequestClass
from .sequence import Rank, RequestState, Sequence, State
from .waiting import WaitingQueue

READER_GRACE_S = 1.0
"""So long a reader may take nothing before its rows give way to work that waits."""


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class RequestTable:
    """Owner of requests, running set, waiting queue, slots and output."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self.requests: dict[int, RequestState] = {}
        self.running: list[Sequence] = []  # sorted by rank
        self.waiting = WaitingQueue()
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.output = StepOutput()
        self.num_preemptions = 0
        self._next_expiry_s = math.inf

    def add(self, request: Request) -> None:
        if request.key in self.requests:
            raise ValueError(f"request key {request.key} is in use")
        ageing = self._config.ageing_s[request.request_class - RequestClass.INTERACTIVE]
        owner = RequestState(request, request.arrival_s + ageing)
        self.requests[request.key] = owner
        if any(choice.ids or choice.finished for choice in request.resume):
            # The delivered answers differ, so each choice is a history of its own; the prompt is
            # shared through the prefix cache.
            for number, choice in enumerate(request.resume):
                if not choice.finished:
                    ids = [*request.prompt_ids, *choice.ids]
                    owner.sequences[number] = Sequence(owner, number, ids)
        else:
            leader = Sequence(owner, 0, list(request.prompt_ids))
            leader.num_waiting_forks = request.n - 1
            owner.sequences[0] = leader
        for sequence in owner.sequences.values():
            self.waiting.push(sequence)
        self._watch_expiry(owner)
        if not owner.sequences:
            self.end_request(owner, FinishReason.STOP, request.arrival_s)

    def start(self, sequence: Sequence) -> None:
        """A sequence that holds blocks takes a slot and runs."""
        sequence.slot = self.free_slots.pop()
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=_rank)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's KV away; it waits to be computed again. Of these losses
        ``max_preemptions`` make it protected; a slow reader's do not count."""
        self._leave(sequence)
        self.num_preemptions += 1
        sequence.owner.preemptions += 1
        if sequence.owner.starved_since_s is None:
            sequence.preemptions += 1
            if sequence.preemptions >= self._config.max_preemptions:
                sequence.rank = (0, *sequence.rank[1:])
        sequence.state = State.WAITING
        self.waiting.push(sequence)

    def starve(self, owner: RequestState, now: float) -> None:
        """A token could be computed and the reader has no room for it."""
        if owner.starved_since_s is None:
            owner.starved_since_s = now
            self._watch_expiry(owner)

    def evict_slow_readers(self, now: float) -> None:
        """For when nothing can run: rows whose reader has had no room for READER_GRACE_S give their
        KV and slots to others that wait."""
        if any(sequence.owner.starved_since_s is None for sequence in self.waiting):
            for sequence in list(self.running):
                starved = sequence.owner.starved_since_s
                if starved is not None and now >= starved + READER_GRACE_S:
                    self.preempt(sequence)

    def end_choice(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        owner = sequence.owner
        self._close(sequence)
        self.output.ended_choices.append(EndedChoice(owner.request.key, sequence.choice, reason))
        if sequence.choice == 0:
            owner.reason = reason
        if not owner.sequences:
            self.end_request(owner, owner.reason, now)

    def end_request(
        self,
        owner: RequestState,
        reason: FinishReason,
        now: float,
        cause: EndCause | None = None,
        message: str = "",
    ) -> None:
        """The only place where a request leaves; its sequences leave with it."""
        request = owner.request
        for sequence in list(owner.sequences.values()):
            self._close(sequence)
        del self.requests[request.key]
        started = now if owner.first_step_s is None else owner.first_step_s
        self.output.ended.append(
            EndedRequest(
                request.key,
                reason,
                cause,
                message,
                max(0.0, started - request.arrival_s),
                owner.cached_tokens,
                owner.recomputed_tokens,
                owner.preemptions,
            )
        )

    def expire(self, now: float) -> None:
        """Ends what is past its deadline or a bounded wait. Looks at the requests only when the
        earliest of those moments has come."""
        if now < self._next_expiry_s:
            return
        self._next_expiry_s = math.inf
        config, cancelled = self._config, FinishReason.CANCELLED
        for owner in list(self.requests.values()):
            request, starved = owner.request, owner.starved_since_s
            if request.deadline_s is not None and now >= request.deadline_s:
                if any(len(s.token_ids) > s.num_prompt for s in owner.sequences.values()):
                    self.end_request(owner, FinishReason.DEADLINE, now)
                else:
                    message = "the deadline passed before the first token"
                    cause = EndCause.DEADLINE_EXCEEDED
                    self.end_request(owner, FinishReason.DEADLINE, now, cause, message)
            elif owner.first_step_s is None and now >= request.arrival_s + config.max_queue_s:
                message = f"not started within max_queue_s = {config.max_queue_s:g} s"
                self.end_request(owner, cancelled, now, EndCause.QUEUE_TIMEOUT, message)
            elif starved is not None and now >= starved + config.slow_reader_s:
                message = f"took no tokens for slow_reader_s = {config.slow_reader_s:g} s"
                self.end_request(owner, cancelled, now, EndCause.SLOW_READER, message)
            else:
                self._watch_expiry(owner)

    def check(self, *, in_flight: bool) -> None:
        """Raises AssertionError unless all bookkeeping agrees (faults B014 to B038)."""
        self._kv.check(self.running)
        slots = [sequence.slot for sequence in self.running]
        fenced = self._config.max_num_seqs - len(slots) - len(self.free_slots)
        if len({*slots, *self.free_slots}) != len(slots) + len(self.free_slots) or fenced < 0:
            raise AssertionError("a slot has two owners")
        if fenced and not in_flight:
            raise AssertionError("a slot was lost")
        live = [s for owner in self.requests.values() for s in owner.sequences.values()]
        if {id(s) for s in live} != {id(s) for s in [*self.running, *self.waiting]}:
            raise AssertionError("live sequences are not exactly the running and waiting ones")
        if [s.rank for s in self.running] != sorted(s.rank for s in self.running):
            raise AssertionError("the running sequences are out of order")
        if not all(owner.sequences for owner in self.requests.values()):
            raise AssertionError("a request without sequences was kept")
        for sequence in live:
            if sequence.num_computed > sequence.num_tokens:
                raise AssertionError("more was computed than is known")
            if (sequence.state is State.RUNNING) != (sequence.slot >= 0):
                raise AssertionError("slot and state disagree")

    def _watch_expiry(self, owner: RequestState) -> None:
        request = owner.request
        moments = [self._next_expiry_s]
        if request.deadline_s is not None:
            moments.append(request.deadline_s)
        if owner.first_step_s is None:
            moments.append(request.arrival_s + self._config.max_queue_s)
        if owner.starved_since_s is not None:
            moments.append(owner.starved_since_s + self._config.slow_reader_s)
        self._next_expiry_s = min(moments)

    def _close(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        del sequence.owner.sequences[sequence.choice]

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence gives up slot and blocks; both are reusable once the last step with
        them has ended."""
        del self.running[bisect_left(self.running, sequence.rank, key=_rank)]
        sequence.max_computed = max(sequence.max_computed, sequence.num_computed)
        self.free_slots += self._kv.free(sequence, sequence.slot)
        sequence.slot = -1
