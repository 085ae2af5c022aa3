"""Finds the rows that make a step fail, so that their mates do not fail with them."""

from __future__ import annotations

from .core.batch import ScheduledBatch, StepResult
from .runners.base import FatalRunnerError, Runner


def run_row_by_row(runner: Runner, batch: ScheduledBatch) -> StepResult:
    """Runs the rows of a failed step one at a time and merges what they give.

    A row that fails alone is told in ``failed_rows``. Slot changes and block copies come first, in
    a step without rows, and only once: a copy made again would undo what a row has written since.
    """
    result = StepResult(batch.step, [-1] * len(batch.samples))
    opening = ScheduledBatch(
        batch.step,
        attached=batch.attached,
        table_updates=batch.table_updates,
        copies=batch.copies,
    )
    _run(runner, opening)
    offset = 0
    for row, count in enumerate(batch.counts):
        samples = [index for index, sample in enumerate(batch.samples) if sample.row == row]
        wants_prompt = row in batch.prompt_logprob_rows
        part = ScheduledBatch(
            batch.step,
            slots=[batch.slots[row]],
            starts=[batch.starts[row]],
            counts=[count],
            token_ids=batch.token_ids[offset : offset + count],
            samples=[batch.samples[index]._replace(row=0) for index in samples],
            prompt_logprob_rows=[0] if wants_prompt else [],
        )
        offset += count
        try:
            alone = _run(runner, part)
        except FatalRunnerError:
            raise
        except Exception as error:
            result.failed_rows[row] = f"{type(error).__name__}: {error}"
            continue
        for position, index in enumerate(samples):
            result.token_ids[index] = alone.token_ids[position]
            if position in alone.failed:
                result.failed[index] = alone.failed[position]
            if position in alone.logprobs:
                result.logprobs[index] = alone.logprobs[position]
        if 0 in alone.prompt_logprobs:
            result.prompt_logprobs[row] = alone.prompt_logprobs[0]
        if 0 in alone.failed_rows:
            result.failed_rows[row] = alone.failed_rows[0]
    # Samples of a failed row have no id; the row's own entry ends its request.
    return result


def _run(runner: Runner, batch: ScheduledBatch) -> StepResult:
    runner.launch(batch)
    return runner.wait()
