"""What a worker has learned of its own speed, for routers to plan with."""

from __future__ import annotations

from .core.batch import ScheduledBatch

_WEIGHT = 0.1
"""Weight of a new sample in the moving averages: about the last 20 steps count."""


class StepStats:
    """Moving averages over the engine's steps. Written by the engine thread; floats are read
    anywhere."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0

    def record(self, batch: ScheduledBatch, elapsed_s: float) -> None:
        """A step that only decodes tells the decode time; one that is mostly prompt tells the
        prefill rate."""
        num_tokens, num_rows = len(batch.token_ids), len(batch.slots)
        if elapsed_s <= 0:
            return
        if num_tokens == num_rows:
            self.decode_step_s = _average(self.decode_step_s, elapsed_s)
        elif num_tokens >= 2 * num_rows:
            rate = num_tokens / elapsed_s
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, rate)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
