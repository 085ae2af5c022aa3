"""Limits and policies of one scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from .policies import BatchingPolicy, CapacityPolicy, Continuous, OnDemand

PRIORITY_AGEING_S = (0.0, 10.0, 120.0)
"""Of interactive, standard and batch requests."""
FCFS_AGEING_S = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policies of one scheduler.

    ``max_num_batched_tokens`` >= ``max_num_seqs``: every decoding row has its place in each step.
    ``max_prefill_chunk``: most tokens of one prompt in one step. ``ageing_s``: how much later an
    arrival of a more urgent class may come and still go first; all zero is plain FCFS.
    ``max_bypass``: how many later sequences may be admitted past one that does not fit yet (fault
    B019). ``max_queue_s``, ``slow_reader_s``: after these waits a request is ended.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_model_len: int
    vocab_size: int
    capacity: CapacityPolicy = field(default_factory=OnDemand)
    batching: BatchingPolicy = field(default_factory=Continuous)
    ageing_s: tuple[float, float, float] = PRIORITY_AGEING_S
    max_bypass: int = 16
    max_preemptions: int = 3
    max_queue_s: float = 600.0
    slow_reader_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.max_num_seqs < 1 or self.max_prefill_chunk < 1:
            raise ValueError("max_num_seqs and max_prefill_chunk must be at least 1")
