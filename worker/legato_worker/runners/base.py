"""What executes a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..core.batch import ScheduledBatch, StepResult


class FatalRunnerError(RuntimeError):
    """The device or its memory is in an unknown state: the worker must end, not go on."""


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """Limits of a loaded model on its device. ``num_blocks`` are usable by sequences."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]


class Runner(Protocol):
    """Executes batches in the order in which they are launched.

    Called from the engine thread only. ``launch`` may return before the step is done; ``wait``
    returns the result of the oldest launched step that has not been waited for. With an in-flight
    depth of 1 the engine launches step k + 1 before it waits for step k; rows of k + 1 that
    continue a row of k then carry :data:`~legato_worker.core.batch.IN_FLIGHT` as their input id,
    and the runner fills in the id it sampled for that slot.

    Errors: a row that fails alone is told in the result. An exception from ``launch`` or ``wait``
    means that the step as a whole failed and has left nothing behind but KV writes to its own
    slots; the engine may launch parts of it again. :class:`FatalRunnerError` means that no further
    call makes sense.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def launch(self, batch: ScheduledBatch) -> None: ...

    def wait(self) -> StepResult: ...

    def close(self) -> None: ...
