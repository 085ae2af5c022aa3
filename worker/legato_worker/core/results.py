"""Takes a step's result into the sequences: tokens, stops, failures, reusable blocks."""

from __future__ import annotations

from .batch import StepResult, TokenLogprobs
from .config import SchedulerConfig
from .kv_cache import KVCacheManager
from .output import EndCause
from .request import FinishReason
from .request_table import RequestTable
from .sequence import Sequence, State
from .step import Step


def take_result(
    step: Step,
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
    batch, out = step.batch, table.output
    if result.step != batch.step:
        raise AssertionError(f"result of step {result.step}, expected {batch.step}")
    out.step = batch.step
    table.free_slots += kv.complete(batch.step)
    if result.failed_rows or result.failed:
        # First, since what a failed row has written must never be matched.
        for row, message in result.failed_rows.items():
            _fail(step.rows[row], message, now, table)
        for index, message in result.failed.items():
            _fail(step.samplers[index], message, now, table)
    size = kv.block_size
    for sequence, start, count in zip(step.rows, batch.starts, batch.counts, strict=True):
        if (start + count) // size > sequence.num_registered and sequence.state is State.RUNNING:
            kv.register(sequence, start + count)
    for row, entries in result.prompt_logprobs.items():
        _take_prompt_logprobs(step.rows[row], batch.starts[row], entries, table)
    vocab_size, logprobs = config.vocab_size, result.logprobs
    for index, (sequence, token_id) in enumerate(zip(step.samplers, result.token_ids, strict=True)):
        sequence.num_in_flight -= 1
        if sequence.state is State.FINISHED:
            sequence.owner.add_credit(1)  # this id is not delivered
        elif not 0 <= token_id < vocab_size:  # fault B050
            _fail(sequence, f"sampled id {token_id} is outside the vocabulary", now, table)
        else:
            if index in logprobs:
                out.logprobs[len(out.ids)] = logprobs[index]
            _take_token(sequence, token_id, now, table, config)


def _take_token(
    sequence: Sequence, token_id: int, now: float, table: RequestTable, config: SchedulerConfig
) -> None:
    request, out, token_ids = sequence.owner.request, table.output, sequence.token_ids
    index = len(token_ids) - sequence.num_prompt
    token_ids.append(token_id)
    out.keys.append(request.key)
    out.choices.append(sequence.choice)
    out.indices.append(index)
    out.ids.append(token_id)
    if token_id in request.stop_token_ids and index + 1 >= request.min_tokens:
        table.end_choice(sequence, FinishReason.STOP, now)
    elif len(token_ids) >= sequence.max_num_tokens or len(token_ids) >= config.max_model_len:
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
