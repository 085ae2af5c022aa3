"""From a scheduled batch to the tensors of its packed step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from legato_kernels.paged import PagedStep
from numpy.typing import NDArray

from ..core.batch import IN_FLIGHT, ScheduledBatch, TableUpdate


class StepInputs:
    """Owner of what outlives a step on the host: per slot its block table and the last id sampled.

    Tables are kept as one array and told of differences, so that building a step is a handful of
    array operations whatever its number of rows and blocks.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        self._tables: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._last_ids: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)

    def update_tables(self, updates: Iterable[TableUpdate]) -> None:
        for slot, start, block_ids in updates:
            self._tables[slot, start : start + len(block_ids)] = block_ids

    def record_sampled(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """What later steps mean by IN_FLIGHT."""
        self._last_ids[slots] = token_ids

    def build(self, batch: ScheduledBatch) -> tuple[torch.Tensor, PagedStep]:
        """Token ids [T] and the step of the batch's rows, of which there is at least one."""
        slots = np.array(batch.slots, np.int64)
        starts = np.array(batch.starts, np.int64)
        counts = np.array(batch.counts, np.int64)
        token_ids = np.array(batch.token_ids, np.int64)
        query_start = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])

        positions = np.arange(len(token_ids)) + np.repeat(starts - query_start[:-1], counts)
        token_slots = np.repeat(slots, counts)
        block, offset = np.divmod(positions, self._block_size)
        slot_mapping = self._tables[token_slots, block] * np.int64(self._block_size) + offset
        in_flight = token_ids == IN_FLIGHT
        token_ids[in_flight] = self._last_ids[token_slots[in_flight]]

        context_lens = starts + counts
        max_context_len = int(context_lens.max())
        num_blocks = -(-max_context_len // self._block_size)
        return torch.from_numpy(token_ids), PagedStep(
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slot_mapping),
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            block_tables=torch.from_numpy(self._tables[slots, :num_blocks]),
            max_query_len=int(counts.max()),
            max_context_len=max_context_len,
        )
