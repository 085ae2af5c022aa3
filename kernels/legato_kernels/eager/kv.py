"""Writes to the KV pool."""

from __future__ import annotations

import torch

from ..paged import PagedKV


def append_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See :func:`legato_kernels.reference.append_kv`."""
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)


def copy_blocks(kv: PagedKV, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See :func:`legato_kernels.reference.copy_blocks`."""
    for cache in (*kv.keys, *kv.values):
        cache.index_copy_(0, targets, cache.index_select(0, sources))
