"""A minimal driver of a packed model: sequences with scattered blocks, fed in any portions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from legato_kernels.paged import PagedKV
from legato_worker.core.batch import ScheduledBatch, TableUpdate
from legato_worker.models.base import PackedModel
from legato_worker.runners.step_inputs import StepInputs

BLOCK_SIZE = 4


@dataclass
class PackedSequences:
    """``model`` over a pool that holds NaN wherever no sequence has written."""

    model: PackedModel
    num_sequences: int
    num_blocks: int = 200
    lengths: list[int] = field(init=False)
    num_held: list[int] = field(init=False)

    def __post_init__(self) -> None:
        layout = self.model.kv_layout
        shape = (self.num_blocks, BLOCK_SIZE, layout.num_kv_heads, layout.head_dim)

        def poisoned() -> list[torch.Tensor]:
            return [
                torch.full(shape, torch.nan, dtype=layout.dtype) for _ in range(layout.num_layers)
            ]

        self.kv = PagedKV(poisoned(), poisoned())
        self.inputs = StepInputs(
            max_num_seqs=self.num_sequences,
            max_model_len=self.model.max_model_len,
            block_size=BLOCK_SIZE,
        )
        self.lengths = [0] * self.num_sequences
        self.num_held = [0] * self.num_sequences
        self.free = torch.randperm(
            self.num_blocks, generator=torch.Generator().manual_seed(0)
        ).tolist()

    def step(self, portions: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Appends ids to sequences in one packed step; logits of each appended position."""
        batch = ScheduledBatch(0)
        for sequence, ids in portions.items():
            start = self.lengths[sequence]
            self.lengths[sequence] += len(ids)
            missing = -(-self.lengths[sequence] // BLOCK_SIZE) - self.num_held[sequence]
            blocks = tuple(self.free.pop() for _ in range(missing))
            batch.table_updates.append(TableUpdate(sequence, self.num_held[sequence], blocks))
            self.num_held[sequence] += missing
            batch.slots.append(sequence)
            batch.starts.append(start)
            batch.counts.append(len(ids))
            batch.token_ids += ids
        self.inputs.update_tables(batch.table_updates)
        token_ids, step = self.inputs.build(batch)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(token_ids, step, self.kv))
        return dict(zip(portions, torch.split(logits, batch.counts), strict=True))
