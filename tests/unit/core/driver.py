"""Drives the production scheduler with the simulated runner, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from legato.block_hash import block_hash, cache_root, chain
from legato_worker.core.batch import StepResult
from legato_worker.core.block_pool import BlockPool
from legato_worker.core.config import SchedulerConfig
from legato_worker.core.kv_cache import BlockHash, KVCacheManager
from legato_worker.core.output import EndedRequest
from legato_worker.core.request import FinishReason, Request, SamplingParams
from legato_worker.core.scheduler import Scheduler
from legato_worker.core.sequence import Sequence
from legato_worker.runners.simulated import SimulatedConfig, SimulatedRunner

ROOT = cache_root(fingerprint="test")
SAMPLING = SamplingParams(temperature=1.0, seed=7)
VOCAB_SIZE = 1000


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Made-up ids; prompts of different seeds differ from the first id on."""
    return [1 + (seed * 61 + position * 7) % 990 for position in range(length)]


class Row(NamedTuple):
    """A packed row of a step, named by its request; ``samples`` is the number of ids it gives."""

    key: int
    choice: int
    start: int
    count: int
    samples: int


class Driver:
    """An engine loop by hand, with every check that can be made from outside in each step.

    ``depth`` steps are launched before the oldest is committed. ``runner`` and ``limits`` override
    fields of SimulatedConfig and SchedulerConfig.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        chunk: int = 64,
        depth: int = 0,
        block_size: int = 16,
        prefix_cache: bool = True,
        hash_function: BlockHash = block_hash,
        runner: dict[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        simulated: dict[str, Any] = {"verify": True, "eos_probability": 0.0, **(runner or {})}
        self._eos_probability: float = simulated["eos_probability"]
        self.runner = SimulatedRunner(
            SimulatedConfig(
                vocab_size=VOCAB_SIZE,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                block_size=block_size,
                **simulated,
            ),
            sleep=lambda _: None,
        )
        self.pool = BlockPool(num_blocks)
        self.kv = KVCacheManager(self.pool, block_size, hash_function, prefix_cache=prefix_cache)
        config: dict[str, Any] = {"max_model_len": 8192, **limits}
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(budget, max_num_seqs),
                max_prefill_chunk=chunk,
                vocab_size=VOCAB_SIZE,
                **config,
            ),
            self.kv,
        )
        self.hash_function = hash_function
        self.depth = depth
        self.now = 0.0
        self.key = 0
        self.requests: dict[int, Request] = {}
        self.answers: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.token_steps: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.num_prompt_logprobs: dict[int, int] = defaultdict(int)
        self.ended_choices: dict[tuple[int, int], FinishReason] = {}
        self.ended: dict[int, EndedRequest] = {}
        self.steps: list[list[Row]] = []  # entry i is step i + 1

    # -- inputs --------------------------------------------------------------------------------

    def add(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> int:
        """Submits a request that arrives now; returns its key."""
        self.key += 1
        root = fields.setdefault("cache_root", ROOT)
        if self.hash_function is block_hash:
            fields["block_hashes"] = chain(root, prompt, self.kv.block_size)
        fields.setdefault("sampling", SAMPLING)
        fields.setdefault("arrival_s", self.now)
        request = Request(self.key, tuple(prompt), max_tokens, **fields)
        self.requests[self.key] = request
        self.scheduler.add(request)
        return self.key

    def cancel(self, key: int, choice: int | None = None) -> None:
        self.scheduler.cancel(key, self.now, choice)

    # -- the loop ------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        launched = self.launch()
        if self.scheduler.num_in_flight > (self.depth if launched else 0):
            self.commit()
        self.collect()
        self.scheduler.check()
        self.now += 0.01
        return launched or self.scheduler.num_in_flight > 0

    def launch(self) -> bool:
        """Schedules and launches a step, if any row can run."""
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            return False
        named = {sequence.slot: sequence for sequence in self.scheduler.table.running}
        samples = [sample.row for sample in batch.samples]
        assert batch.step == len(self.steps) + 1
        assert sum(batch.counts) == len(batch.token_ids) and min(batch.counts) > 0
        assert len(batch.token_ids) <= self.scheduler.config.max_num_batched_tokens
        self.steps.append(
            [
                Row(
                    named[slot].owner.request.key,
                    named[slot].choice,
                    start,
                    count,
                    samples.count(row),
                )
                for row, (slot, start, count) in enumerate(
                    zip(batch.slots, batch.starts, batch.counts, strict=True)
                )
            ]
        )
        self.runner.launch(batch)
        return True

    def commit(self, change: Callable[[StepResult], None] | None = None) -> None:
        """Takes the oldest result; ``change(result)`` may falsify it first."""
        result = self.runner.wait()
        if change is not None:
            change(result)
        self.scheduler.commit(result, self.now)

    def collect(self) -> None:
        """Takes the output, which must be contiguous and end everything exactly once."""
        out = self.scheduler.take_output()
        for key, choice, index, token_id in zip(
            out.keys, out.choices, out.indices, out.ids, strict=True
        ):
            answer = self.answers[key, choice]
            assert index == len(answer) + self.num_resumed(key, choice), "a gap or a repetition"
            assert key not in self.ended and (key, choice) not in self.ended_choices
            answer.append(token_id)
            self.token_steps[key, choice].append(out.step)
        for key, entries in out.prompt_logprobs.items():
            self.num_prompt_logprobs[key] += len(entries)
        for choice_end in out.ended_choices:
            assert (choice_end.key, choice_end.choice) not in self.ended_choices
            self.ended_choices[choice_end.key, choice_end.choice] = choice_end.reason
        for end in out.ended:
            assert end.key not in self.ended, "a request ended twice"
            self.ended[end.key] = end

    def run(self, max_steps: int = 10_000) -> int:
        """Turns until all requests have ended; fails when that takes more than ``max_steps``."""
        for steps in range(max_steps):
            if not self.scheduler.has_work:
                self.collect()
                return steps
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    # -- views ---------------------------------------------------------------------------------

    def num_resumed(self, key: int, choice: int) -> int:
        resume = self.requests[key].resume
        return len(resume[choice].ids) if resume else 0

    def rows_of(self, key: int) -> list[tuple[int, Row]]:
        """(step, row) of every row that the request had."""
        return [
            (step, row) for step, rows in enumerate(self.steps, 1) for row in rows if row.key == key
        ]

    def sequence(self, key: int, choice: int = 0) -> Sequence:
        return self.scheduler.table.requests[key].sequences[choice]

    def keys_running(self) -> list[int]:
        return [sequence.owner.request.key for sequence in self.scheduler.table.running]

    def assert_idle(self) -> None:
        """Everything given out has come back (faults B028, B037)."""
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert self.pool.num_used == 0 and self.kv.num_fenced == 0
        assert len(scheduler.table.free_slots) == scheduler.config.max_num_seqs
        assert not scheduler.table.running and not scheduler.table.waiting
        scheduler.check()

    def assert_solo(self, key: int) -> None:
        """Every choice of a finished request has the answer that it has alone on a fresh worker."""
        request = self.requests[key]
        alone, end = answer_alone(request, self.kv.block_size, self._eos_probability)
        for choice in range(request.n):
            delivered = (*self.resumed_ids(key, choice), *self.answers[key, choice])
            assert delivered == alone[choice], f"request {key}, choice {choice}"
        assert self.ended[key].reason is end.reason and self.ended[key].cause is None

    def resumed_ids(self, key: int, choice: int) -> tuple[int, ...]:
        resume = self.requests[key].resume
        return resume[choice].ids if resume else ()


_ALONE: dict[object, tuple[list[tuple[int, ...]], EndedRequest]] = {}


def answer_alone(
    request: Request, block_size: int = 16, eos_probability: float = 0.0
) -> tuple[list[tuple[int, ...]], EndedRequest]:
    """Each choice's answer on a fresh, roomy worker without a prefix cache, and how it ended."""
    fields = {
        "n": request.n,
        "sampling": request.sampling,
        "stop_token_ids": request.stop_token_ids,
        "min_tokens": request.min_tokens,
    }
    identity = (
        request.prompt_ids,
        request.max_tokens,
        block_size,
        eos_probability,
        *fields.values(),
    )
    if identity not in _ALONE:
        driver = Driver(
            num_blocks=512,
            block_size=block_size,
            prefix_cache=False,
            runner={"eos_probability": eos_probability},
        )
        key = driver.add(list(request.prompt_ids), request.max_tokens, **fields)
        driver.run()
        driver.assert_idle()
        answers = [tuple(driver.answers[key, choice]) for choice in range(request.n)]
        _ALONE[identity] = answers, driver.ended[key]
    return _ALONE[identity]
