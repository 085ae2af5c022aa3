"""The packed step as kernels see it: tensors only, planned once per step, used by every layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class PagedStep:
    """Rows of a step laid one after the other without padding (selective batching, Orca section
    3.2: only attention needs to know where a row begins).

    T tokens, R rows. A row computes its last ``query_start[i + 1] - query_start[i]`` positions and
    attends to all its ``context_lens[i]`` positions (this step's included) through its block table.

    - ``positions`` [T] int64: position of each token in its sequence
    - ``slot_mapping`` [T] int64: where its K and V go, ``block_id * block_size + offset``
    - ``query_start`` [R + 1] int32, ``context_lens`` [R] int32
    - ``block_tables`` [R, max_blocks] int32: entries past a row's length are undefined
    - ``max_query_len``, ``max_context_len``: over the rows
    - ``plans``: what a backend derives from the above at its first use, for the layers after it
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_context_len: int
    plans: dict[Hashable, object] = field(default_factory=dict, repr=False)


@dataclass(slots=True)
class PagedKV:
    """The KV pool of one model: per layer two tensors [num_blocks, block_size, num_kv_heads,
    head_dim]. Blocks that no sequence owns may hold anything, NaN included; kernels never let a
    value outside a row's context reach an output."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def block_size(self) -> int:
        return int(self.keys[0].shape[1])
