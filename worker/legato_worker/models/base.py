"""A decoder that runs packed rows over paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from legato_kernels.paged import PagedKV, PagedStep


class UnsupportedModelError(ValueError):
    """This model would not run, or would answer wrongly; the message names the model and why."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one token's KV: layers x (key and value) x heads x head size, in ``dtype``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PackedModel(Protocol):
    """Stateless between calls but for its weights."""

    @property
    def kv_layout(self) -> KVLayout: ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table: ids at or above it must never arrive here."""
        ...

    @property
    def max_model_len(self) -> int: ...

    def forward(self, token_ids: torch.Tensor, step: PagedStep, kv: PagedKV) -> torch.Tensor:
        """Hidden states [T, hidden] of the packed tokens [T] int64; writes their K and V."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [N, vocab_size] of N hidden states."""
        ...
