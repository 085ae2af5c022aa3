"""Takes a step's result into the sequences: tokens, stops, failures, reusable blocks."""

from __future__ import annotations

from dataclasses import dataclass

from .batch import ScheduledBatch, StepResult, TokenLogprobs
from .config import SchedulerConfig
from .kv_cache import KVCacheManager
from .output import EndCause
from .request import FinishReason
from .request_table import RequestTable
from .sequence import Sequence, State


@dataclass(slots=True)
class StepInFlight:
    """A launched step: its batch, the sequence of each packed row and of each sample."""

    batch: ScheduledBatch
    rows: list[Sequence]
    samplers: list[Sequence]


def take_result(
    flight: StepInFlight,
    result: StepResult,
    now: float,
    table: RequestTable,
    kv: KVCacheManager,
    config: SchedulerConfig,
) -> None:
    """Applies ``result`` to the requests. A row that failed ends its own request alone.

    A sequence may have ended or lost its KV since the step was launched; what the step computed for
    it is dropped, except that an id sampled for a preempted sequence counts.
    """
    batch, out = flight.batch, table.output
    if result.step != batch.step:
        raise AssertionError(f"result of step {result.step}, expected {batch.step}")
    out.step = batch.step
    table.free_slots += kv.complete(batch.step)
    # What a failed row has written must never be matched.
    failed = dict(result.failed_rows)
    failed.update((batch.samples[index].row, why) for index, why in result.failed.items())
    size = kv.block_size
    for row, sequence in enumerate(flight.rows):
        end = batch.starts[row] + batch.counts[row]
        if row in failed:
            _fail(sequence, failed[row], now, table)
        elif sequence.state is State.RUNNING and end // size > sequence.num_registered:
            kv.register(sequence, end)
    for row, entries in result.prompt_logprobs.items():
        _take_prompt_logprobs(flight.rows[row], batch.starts[row], entries, table)
    for index, sequence in enumerate(flight.samplers):
        sequence.num_in_flight -= 1
        if sequence.state is State.FINISHED:
            continue
        if index in result.failed:
            _fail(sequence, result.failed[index], now, table)
            continue
        token_id = result.token_ids[index]
        if not 0 <= token_id < config.vocab_size:  # fault B050
            _fail(sequence, f"sampled id {token_id} is outside the vocabulary", now, table)
            continue
        if index in result.logprobs:
            out.logprobs[len(out.ids)] = result.logprobs[index]
        _take_token(sequence, token_id, now, table, config)


def _take_token(
    sequence: Sequence, token_id: int, now: float, table: RequestTable, config: SchedulerConfig
) -> None:
    request, out = sequence.owner.request, table.output
    index = len(sequence.token_ids) - sequence.num_prompt
    sequence.token_ids.append(token_id)
    out.keys.append(request.key)
    out.choices.append(sequence.choice)
    out.indices.append(index)
    out.ids.append(token_id)
    length = index + 1
    if token_id in request.stop_token_ids and length >= request.min_tokens:
        table.end_choice(sequence, FinishReason.STOP, now)
    elif length >= request.max_tokens or len(sequence.token_ids) >= config.max_model_len:
        table.end_choice(sequence, FinishReason.LENGTH, now)


def _take_prompt_logprobs(
    sequence: Sequence, start: int, entries: list[TokenLogprobs], table: RequestTable
) -> None:
    """Keeps entries that were not delivered before (recompute gives them again)."""
    owner = sequence.owner
    if sequence.state is State.FINISHED or sequence.choice != 0:
        return
    fresh = entries[max(0, owner.num_prompt_logprobs - start) :]
    owner.num_prompt_logprobs += len(fresh)
    table.output.prompt_logprobs.setdefault(owner.request.key, []).extend(fresh)


def _fail(sequence: Sequence, message: str, now: float, table: RequestTable) -> None:
    if sequence.state is not State.FINISHED:
        cancelled = FinishReason.CANCELLED
        table.end_request(sequence.owner, cancelled, now, EndCause.INTERNAL, message)
