"""A runner without a model: real KV bookkeeping, made-up ids, a stated step time, scripted faults.

Each KV slot holds a hash of the whole prefix up to its position, computed from what the block table
says the previous position holds. The next id is a function of that hash. So an answer depends on
the KV content as a real model's does: a block handed out too early, a missed copy or a wrong table
changes the text. Needs neither torch nor numpy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from ..core.batch import IN_FLIGHT, AttachedRow, ScheduledBatch, StepResult, TokenLogprobs
from .base import FatalRunnerError, RunnerSpec

_MASK = (1 << 64) - 1
_POISON = -1
_ROOT = 0x9E3779B97F4A7C15


def mix(state: int, value: int) -> int:
    """One step of splitmix64 over ``state`` and ``value``."""
    z = (state ^ (value * 0xBF58476D1CE4E5B9)) + 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of a step: ``base + per_token * tokens + per_row * rows + per_context * context``,
    times a log-normal factor of ``noise`` (standard deviation of the logarithm)."""

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_row_s: float = 0.0
    per_context_s: float = 0.0
    noise: float = 0.0

    def seconds(self, batch: ScheduledBatch, random: Random) -> float:
        context = sum(batch.starts) + sum(batch.counts)
        time_s = (
            self.base_s
            + self.per_token_s * len(batch.token_ids)
            + self.per_row_s * len(batch.slots)
            + self.per_context_s * context
        )
        return time_s * random.lognormvariate(0.0, self.noise) if self.noise else time_s


class FaultKind(StrEnum):
    RAISE = "raise"  # the whole step raises, each time it holds the row
    FATAL = "fatal"  # the device is gone
    NO_LOGITS = "no_logits"  # the row's logits are not finite
    BAD_ID = "bad_id"  # the sampler answers with an id outside the vocabulary
    STALL = "stall"  # the step takes ``stall_s`` longer


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes each step that computes prompt token ``token_id`` (so tests aim at one request), or
    the ``step``-th step when ``token_id`` is None."""

    kind: FaultKind
    token_id: int | None = None
    step: int | None = None
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """``eos_probability``: chance of the end-of-sequence id (0) at each position. ``verify``:
    re-read each row's whole history at each step (slow; for tests)."""

    vocab_size: int = 49152
    max_model_len: int = 8192
    block_size: int = 16
    num_blocks: int = 1024
    max_num_seqs: int = 64
    eos_probability: float = 0.0
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    verify: bool = False


class SimulatedRunner:
    """Implements :class:`~legato_worker.runners.base.Runner`. ``sleep`` passes the step's time:
    ``time.sleep`` when serving, a virtual clock's advance in simulation."""

    def __init__(self, config: SimulatedConfig, sleep: Callable[[float], None]) -> None:
        self._config = config
        self._sleep = sleep
        self._random = Random(config.seed)
        self._kv = [[_POISON] * config.block_size for _ in range(config.num_blocks)]
        self._tables: list[list[int]] = [[] for _ in range(config.max_num_seqs)]
        self._rows: list[AttachedRow | None] = [None] * config.max_num_seqs
        self._last_ids = [IN_FLIGHT] * config.max_num_seqs
        self._results: deque[StepResult] = deque()

    @property
    def spec(self) -> RunnerSpec:
        c = self._config
        return RunnerSpec(
            c.vocab_size, c.max_model_len, c.block_size, c.num_blocks, c.max_num_seqs, (0,)
        )

    def launch(self, batch: ScheduledBatch) -> None:
        config = self._config
        for attached in batch.attached:
            self._rows[attached.slot] = attached
            self._tables[attached.slot] = []
        for update in batch.table_updates:
            table = self._tables[update.slot]
            table[update.start : update.start + len(update.block_ids)] = update.block_ids
        for source, target in batch.copies:
            self._kv[target] = list(self._kv[source])
        self._strike(batch)
        time_s = config.step_time.seconds(batch, self._random)
        ends = self._compute(batch)
        result = StepResult(batch.step, [])
        for index, sample in enumerate(batch.samples):
            fault = self._fault_of(batch.slots[sample.row])
            if fault is FaultKind.NO_LOGITS:
                result.failed[index] = "the logits are not finite"
            token_id = self._sample(ends[sample.row], sample.slot, sample.position, result, index)
            result.token_ids.append(config.vocab_size if fault is FaultKind.BAD_ID else token_id)
            self._last_ids[sample.slot] = token_id
        for row in batch.prompt_logprob_rows:
            num_prompt = self._attached(batch.slots[row]).num_prompt
            last = min(batch.starts[row] + batch.counts[row], num_prompt - 1)
            result.prompt_logprobs[row] = [
                TokenLogprobs(-1.0, 1, (), ()) for _ in range(batch.starts[row], last)
            ]
        self._results.append(result)
        if time_s > 0:
            self._sleep(time_s)

    def wait(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        """Nothing is held."""

    def _compute(self, batch: ScheduledBatch) -> list[int]:
        """Writes the rows' KV; returns each row's hash at its last position."""
        size, ends, offset = self._config.block_size, [], 0
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
            table = self._tables[slot]
            state = _ROOT
            if start:
                state = self._kv[table[(start - 1) // size]][(start - 1) % size]
                if self._config.verify:
                    self._verify(slot, start, batch.step)
            for position in range(start, start + count):
                token_id = batch.token_ids[offset]
                offset += 1
                if token_id == IN_FLIGHT:
                    token_id = self._last_ids[slot]
                state = mix(state, token_id)
                self._kv[table[position // size]][position % size] = state
            ends.append(state)
        return ends

    def _verify(self, slot: int, start: int, step: int) -> None:
        """Every earlier position of the row must hold the hash of the row's own history."""
        size, table, row = self._config.block_size, self._tables[slot], self._attached(slot)
        state = _ROOT
        for position in range(min(start, len(row.token_ids))):
            state = mix(state, row.token_ids[position])
            held = self._kv[table[position // size]][position % size]
            if held != state:
                raise AssertionError(f"step {step}: slot {slot} lost its KV at {position}")

    def _sample(self, state: int, slot: int, position: int, result: StepResult, index: int) -> int:
        config, row = self._config, self._attached(slot)
        params = row.sampling
        if params.temperature > 0:
            state = mix(mix(state, params.seed), row.choice)
        draw = mix(state, position)
        minimum = row.num_prompt + row.min_tokens
        wants_eos = (draw >> 11) / (1 << 53) < config.eos_probability
        token_id = 0 if wants_eos and position >= minimum else 1 + draw % (config.vocab_size - 1)
        if params.logprobs is not None:
            ids = tuple((token_id + k) % config.vocab_size for k in range(params.logprobs))
            result.logprobs[index] = TokenLogprobs(
                -1.0, 1, ids, tuple(-1.0 - k for k in range(len(ids)))
            )
        return token_id

    def _strike(self, batch: ScheduledBatch) -> None:
        if not self._config.faults:
            return
        computed: set[int] = set()
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
            computed.update(self._prompt(slot)[start : start + count])
        for fault in self._config.faults:
            if fault.step != batch.step and fault.token_id not in computed:
                continue
            if fault.kind is FaultKind.RAISE:
                raise RuntimeError("scripted fault: the step raised")
            if fault.kind is FaultKind.FATAL:
                raise FatalRunnerError("scripted fault: the device is gone")
            if fault.kind is FaultKind.STALL:
                self._sleep(fault.stall_s)

    def _fault_of(self, slot: int) -> FaultKind | None:
        for fault in self._config.faults:
            row_fault = fault.kind in (FaultKind.NO_LOGITS, FaultKind.BAD_ID)
            if row_fault and fault.token_id in self._prompt(slot):
                return fault.kind
        return None

    def _prompt(self, slot: int) -> tuple[int, ...]:
        row = self._attached(slot)
        return row.token_ids[: row.num_prompt]

    def _attached(self, slot: int) -> AttachedRow:
        row = self._rows[slot]
        if row is None:
            raise AssertionError(f"slot {slot} was used before it was attached")
        return row
