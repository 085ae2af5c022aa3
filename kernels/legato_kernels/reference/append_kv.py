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
    """Stores keys and values [T, num_kv_heads, head_dim] of a layer in its pool [num_blocks,
    block_size, num_kv_heads, head_dim], token t at ``slot_mapping[t]``; nothing else is written.
    """
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        key_cache[slot // block_size, slot % block_size] = key[token]
        value_cache[slot // block_size, slot % block_size] = value[token]


def copy_blocks(kv: PagedKV, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies block ``sources[i]`` to ``targets[i]`` (int64) in every layer. No block is both a
    source and a target, and none is a target twice."""
    for cache in (*kv.keys, *kv.values):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            cache[target] = cache[source]
