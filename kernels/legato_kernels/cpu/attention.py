"""Paged attention: single queries by the compiled kernel, pieces of prompts by eager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from .. import eager
from ..eager.attention import attend_pieces
from ..eager.plan import AttentionCall, plan_attention
from ..paged import PagedStep
from .native import LANES, native

SPLIT = 256
"""Positions per work item, as in kernels.cpp."""
_HEAD_DIMS = frozenset({16, 32, 48, 64, 80, 96, 128, 256})
_MAX_HEADS = 128


@dataclass(frozen=True, slots=True)
class _Plan:
    """Rows with one query (their packed token, row and context length), room for their partial
    results, and the calls for all other rows."""

    tokens: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    max_splits: int
    scratch: torch.Tensor
    pieces: list[AttentionCall]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    step: PagedStep,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """See :func:`legato_kernels.reference.paged_attention`."""
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    covered = (
        query.dtype is key_cache.dtype
        and query.dtype in (torch.bfloat16, torch.float32)
        and head_dim in _HEAD_DIMS
        and num_heads <= _MAX_HEADS
        and query.stride()[1:] == (head_dim, 1)
    )
    if not covered:
        return eager.paged_attention(
            *(query, key_cache, value_cache, step),
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    plan_key = ("cpu", sliding_window, query.dtype)
    if plan_key not in step.plans:
        step.plans[plan_key] = _plan(step, key_cache.shape, sliding_window, query)
    plan = cast(_Plan, step.plans[plan_key])
    output = torch.empty((query.shape[0], num_heads, head_dim), dtype=query.dtype)
    if len(plan.tokens):
        native().attend(
            *(query.dtype is torch.bfloat16, head_dim, query.data_ptr(), query.stride(0)),
            *(key_cache.data_ptr(), value_cache.data_ptr()),
            *(step.block_tables.data_ptr(), step.block_tables.stride(0)),
            *(plan.tokens.data_ptr(), plan.rows.data_ptr(), plan.lengths.data_ptr()),
            *(len(plan.tokens), num_heads, num_kv_heads, block_size),
            *(sliding_window or 0, plan.max_splits, scale, soft_cap or 0.0),
            *(plan.scratch.data_ptr(), output.data_ptr()),
        )
    attend_pieces(
        plan.pieces, query, key_cache, value_cache, output, scale=scale, soft_cap=soft_cap
    )
    return output


def _plan(
    step: PagedStep, cache_shape: torch.Size, window: int | None, query: torch.Tensor
) -> _Plan:
    single = torch.diff(step.query_start) == 1
    rows = single.nonzero().flatten().int()
    lengths = step.context_lens.index_select(0, rows)
    max_splits = -(-int(lengths.max()) // SPLIT) if len(rows) else 0
    _, num_heads, head_dim = query.shape
    size = len(rows) * num_heads * max_splits * (head_dim + LANES)
    return _Plan(
        tokens=step.query_start.index_select(0, rows),
        rows=rows,
        lengths=lengths,
        max_splits=max_splits,
        scratch=torch.empty(size, dtype=torch.float32),
        pieces=plan_attention(step, cache_shape, window, query.dtype, singles=False),
    )
