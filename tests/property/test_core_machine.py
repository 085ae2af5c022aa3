"""Pool, manager and scheduler as a state machine, on the simulated runner.

Tiny pools, budgets and blocks; requests that share prefixes, fork, resume, run out of credit, pass
their deadlines, are cancelled or fail. The KV of the simulated runner holds a hash of each prefix,
so any block handed out too early, copied too late or matched wrongly changes an answer.

About 10,000 steps by default. ``LEGATO_MACHINE_EXAMPLES=4000`` runs that many random examples (50
rules each) with fresh seeds instead.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from typing import Any

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from legato.block_hash import cache_root
from legato_worker.core.batch import StepResult
from legato_worker.core.output import EndCause
from legato_worker.core.policies import Continuous, OnDemand, Reserve, Static
from legato_worker.core.request import (
    FinishReason,
    Request,
    RequestClass,
    ResumedChoice,
    SamplingParams,
)
from legato_worker.core.sequence import Sequence
from legato_worker.runners.simulated import Fault, FaultKind

from tests.unit.core.driver import ROOT, Driver, answer_alone

EXAMPLES = int(os.environ.get("LEGATO_MACHINE_EXAMPLES", "0"))
BAD_ID, NO_LOGITS = 998, 999
FAULTS = (Fault(FaultKind.BAD_ID, BAD_ID), Fault(FaultKind.NO_LOGITS, NO_LOGITS))
EOS = frozenset({0})
ROOTS = (ROOT, cache_root(fingerprint="test", tenant="other"))
UNLIMITED = 1 << 31
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=1.0, seed=8),
    SamplingParams(temperature=1.0, seed=7, prompt_logprobs=0),
)
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)

REQUESTS = st.fixed_dictionaries(
    {
        "stem": st.sampled_from((1, 1, 1, 2)),
        "shared": st.sampled_from((0, 1, 7, 12, 15, 16, 17, 20)),
        "suffix": st.lists(st.integers(1, 3), max_size=4),
        "max_tokens": st.sampled_from((1, 2, 3, 8, 16, 30)),
        "n": st.sampled_from((1, 1, 1, 1, 2, 3)),
        "request_class": st.sampled_from(RequestClass),
        "patience_s": st.sampled_from((None,) * 9 + (0.03, 0.2, 1.0)),
        "credit": st.sampled_from((UNLIMITED, UNLIMITED, UNLIMITED, 0, 2, 5)),
        "resumed": st.none() | st.lists(st.integers(-1, 12), min_size=3, max_size=3),
        "cache_root": st.sampled_from((*ROOTS[:1], *ROOTS)),
        "sampling": st.sampled_from(SAMPLINGS),
        "stop_token_ids": st.sampled_from((EOS, frozenset())),
        "min_tokens": st.integers(0, 3),
        "poison": st.sampled_from((0,) * 20 + (BAD_ID, NO_LOGITS)),
    }
)


class CoreMachine(RuleBasedStateMachine):
    driver: Driver

    @initialize(
        depth=st.integers(0, 1),
        pool_tokens=st.integers(30, 80),
        block_size=st.sampled_from((1, 2, 3, 4, 8, 16)),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from((1, 8, 20, 60)),
        chunk=st.sampled_from((1, 3, 7, 16, 64)),
        prefix_cache=st.sampled_from((True, True, False)),
        capacity=st.sampled_from((OnDemand(), OnDemand(), OnDemand(watermark=0.2), Reserve())),
        batching=st.sampled_from((Continuous(), Continuous(), Continuous(), Static())),
        max_preemptions=st.integers(1, 3),
        max_bypass=st.integers(0, 3),
        eos_probability=st.sampled_from((0.0, 0.02, 0.2)),
    )
    def start(
        self, pool_tokens: int, block_size: int, eos_probability: float, **parameters: Any
    ) -> None:
        self.driver = Driver(
            num_blocks=max(2, pool_tokens // block_size),
            block_size=block_size,
            runner={"eos_probability": eos_probability, "faults": FAULTS},
            max_queue_s=20.0,
            slow_reader_s=10.0,
            ageing_s=(0.0, 0.5, 2.0),
            **parameters,
        )
        self.eos_probability = eos_probability
        self.reserving = parameters["capacity"] == Reserve()
        self.granted: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.failed: set[int] = set()
        self.cancelled_choices: dict[int, set[int]] = defaultdict(set)

    # -- rules ---------------------------------------------------------------------------------

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.add_one(**request)

    def add_one(
        self,
        stem: int,
        shared: int,
        suffix: list[int],
        max_tokens: int,
        n: int,
        patience_s: float | None,
        resumed: list[int] | None,
        poison: int,
        min_tokens: int,
        **fields: Any,
    ) -> None:
        driver = self.driver
        prompt = [10 * stem + position for position in range(shared)] + suffix
        prompt = [*prompt, poison] if poison else prompt or [5]
        if not driver.scheduler.fits(len(prompt), max_tokens, n):
            return
        fields |= {"n": n, "min_tokens": min(min_tokens, max_tokens)}
        if patience_s is not None:
            fields["deadline_s"] = driver.now + patience_s
        if resumed is not None and not poison:
            fields["resume"] = self.cut(Request(0, tuple(prompt), max_tokens, **fields), resumed)
        key = driver.add(prompt, max_tokens, **fields)
        self.granted[key] = fields["credit"]

    def cut(self, request: Request, lengths: list[int]) -> tuple[ResumedChoice, ...]:
        """Resume points inside the true answers; a length of -1 is an answer that had ended."""
        answers, _ = answer_alone(request, self.driver.kv.block_size, self.eos_probability)
        return tuple(
            ResumedChoice(answer[: min(length, len(answer) - 1)])
            if length >= 0
            else ResumedChoice(answer, True)
            for answer, length in zip(answers, lengths, strict=False)
        )

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.driver.step()

    @rule(times=st.integers(5, 15))
    def run_on(self, times: int) -> None:
        self.step(times)

    @rule(data=st.data(), tokens=st.integers(1, 6))
    @precondition(lambda self: self.driver.scheduler.table.requests)
    def grant(self, data: st.DataObject, tokens: int) -> None:
        key = self.some_request(data)
        self.driver.scheduler.grant(key, tokens)
        self.granted[key] += tokens

    @rule(seconds=st.sampled_from((0.05, 0.3, 1.1, 11.0)))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds

    @rule(
        data=st.data(), kind=st.sampled_from(("cancel", "choice", "row", "sample", "id", "reset"))
    )
    @precondition(lambda self: self.driver.scheduler.table.requests)
    def disturb(self, data: st.DataObject, kind: str) -> None:
        if kind == "cancel":
            self.cancelled.add(key := self.some_request(data))
            self.driver.cancel(key)
        elif kind == "choice":
            choice = data.draw(st.integers(0, 2))
            self.cancelled_choices[key := self.some_request(data)].add(choice)
            self.driver.cancel(key, choice)
        elif kind == "reset":
            self.driver.pool.reset_cache()
        elif self.driver.scheduler.num_in_flight or self.driver.launch():
            self.fail(kind, data.draw(st.integers(0, 5)))

    def fail(self, kind: str, row: int) -> None:
        """The oldest step in flight comes back with a failed row, sample or id."""
        step = self.driver.scheduler._in_flight[0]
        row %= len(step.rows)
        samples = [index for index, sample in enumerate(step.batch.samples) if sample.row == row]

        def spoil(result: StepResult) -> None:
            if kind == "row":
                result.failed_rows[row] = "the row raised"
            for index in samples[:1]:
                if kind == "sample":
                    result.failed[index] = "the logits are not finite"
                else:
                    result.token_ids[index] = -1

        if kind == "row" or samples:
            self.failed.add(step.rows[row].owner.request.key)
        self.driver.commit(spoil)
        self.driver.collect()

    def some_request(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.driver.scheduler.table.requests)))

    # -- invariants ----------------------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        self.bookkeeping_agrees()
        self.blocks_are_shared_by_equal_histories_only()
        self.credit_is_neither_lost_nor_overdrawn()
        self.answers_are_prefixes_of_the_solo_run()

    def bookkeeping_agrees(self) -> None:
        pool = self.driver.pool
        self.driver.scheduler.check()
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        # Slow readers give way under any policy; that is not counted among these.
        limit = 0 if self.reserving else self.driver.scheduler.config.max_preemptions
        for owner in self.driver.scheduler.table.requests.values():
            assert all(sequence.preemptions <= limit for sequence in owner.sequences.values())

    def blocks_are_shared_by_equal_histories_only(self) -> None:
        holders: dict[int, list[tuple[int, Sequence]]] = defaultdict(list)
        for sequence in self.driver.scheduler.table.running:
            for index, block_id in enumerate(sequence.block_ids):
                holders[block_id].append((index, sequence))
        size = self.driver.kv.block_size
        for places in holders.values():
            index, first = places[0]
            for other_index, other in places[1:]:
                end = min((index + 1) * size, first.num_computed, other.num_computed)
                assert index == other_index
                assert first.token_ids[:end] == other.token_ids[:end]

    def credit_is_neither_lost_nor_overdrawn(self) -> None:
        driver, promised = self.driver, Counter[int]()
        for flight in driver.scheduler._in_flight:
            promised.update(sequence.owner.request.key for sequence in flight.samplers)
        delivered: Counter[int] = Counter()
        for (key, _), answer in driver.answers.items():
            delivered[key] += len(answer)
        for key, owner in driver.scheduler.table.requests.items():
            assert owner.credit + delivered[key] + promised[key] == self.granted[key]
            assert owner.credit >= 0

    def answers_are_prefixes_of_the_solo_run(self) -> None:
        for key in self.driver.scheduler.table.requests:
            self.compare(key, complete=False)

    # -- the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        driver = self.driver
        live = driver.scheduler.table.requests
        for key in list(live):
            driver.scheduler.grant(key, UNLIMITED)
            self.granted[key] += UNLIMITED
        # Each turn computes a token of some sequence, unless all wait for the step before it (a
        # fenced block, the last id); what preemption computes again hides behind other rows.
        tokens = sum(
            owner.request.n * (len(owner.request.prompt_ids) + owner.request.max_tokens)
            for owner in live.values()
        )
        driver.run(max_steps=2 * tokens + 4)
        driver.assert_idle()
        assert driver.ended.keys() == driver.requests.keys()
        for key in driver.requests:
            self.judge(key)

    def judge(self, key: int) -> None:
        request, end = self.driver.requests[key], self.driver.ended[key]
        if request.credit == UNLIMITED:
            assert end.preemptions <= request.n * self.driver.scheduler.config.max_preemptions
        if {BAD_ID, NO_LOGITS} & set(request.prompt_ids):
            assert end.cause is not None or end.reason not in COMPLETE
            assert not any(self.driver.answers[key, choice] for choice in range(request.n))
            return
        assert end.cause is not EndCause.INTERNAL or key in self.failed
        if end.reason is FinishReason.CANCELLED and end.cause is None:
            assert key in self.cancelled or self.cancelled_choices[key]
        self.compare(key, complete=end.reason in COMPLETE and end.cause is None)

    def compare(self, key: int, *, complete: bool) -> None:
        """The answer so far is a prefix of the solo run's; the whole, where it is complete."""
        driver, request = self.driver, self.driver.requests[key]
        if {BAD_ID, NO_LOGITS} & set(request.prompt_ids):
            return
        alone, _ = answer_alone(request, driver.kv.block_size, self.eos_probability)
        for choice, expected in enumerate(alone):
            got = (*driver.resumed_ids(key, choice), *driver.answers[key, choice])
            assert got == expected[: len(got)]
            if complete and choice not in self.cancelled_choices[key]:
                assert got == expected
                assert driver.ended_choices.get((key, choice)) in (None, *COMPLETE)


def test_core_machine() -> None:
    """Faults B014 to B038 and B065 to B071, in random combinations."""
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=EXAMPLES or 200,
            stateful_step_count=50,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
