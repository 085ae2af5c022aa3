"""Paged attention as gathers and torch's own attention."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional

from ..paged import PagedStep
from .plan import AttentionCall, plan_attention


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
    plan_key = ("eager", sliding_window, query.dtype)
    if plan_key not in step.plans:
        step.plans[plan_key] = plan_attention(step, key_cache.shape, sliding_window, query.dtype)
    calls = cast(list[AttentionCall], step.plans[plan_key])
    output = query.new_empty(query.shape)
    attend_pieces(calls, query, key_cache, value_cache, output, scale=scale, soft_cap=soft_cap)
    return output


def attend_pieces(
    calls: list[AttentionCall],
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Runs planned calls and writes their tokens' rows of ``output``, and no others."""
    _, _, num_kv_heads, head_dim = key_cache.shape
    keys = key_cache.view(-1, num_kv_heads * head_dim)
    values = value_cache.view(-1, num_kv_heads * head_dim)
    for call in calls:
        gathered = (call.num_pieces, call.num_keys, num_kv_heads, head_dim)
        attended = _attend(
            query.index_select(0, call.tokens).view(
                call.num_pieces, call.query_len, *query.shape[1:]
            ),
            keys.index_select(0, call.key_slots).view(gathered).transpose(1, 2),
            values.index_select(0, call.key_slots).view(gathered).transpose(1, 2),
            call.bias,
            scale,
            soft_cap,
        )
        output.index_copy_(0, call.tokens, attended.reshape(-1, *query.shape[1:]))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """query [N, Q, heads, D]; key and value [N, KV heads, L, D]; returns [N, Q, heads, D]."""
    num_pieces, query_len, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if soft_cap is not None:
        return _attend_capped(query, key, value, bias, scale, soft_cap)
    if query_len == 1:
        # The heads that share a KV head stand in for queries: torch's grouped heads are several
        # times slower here.
        folded = query.view(num_pieces, num_kv_heads, -1, head_dim)
        return functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=bias, scale=scale
        ).reshape(query.shape)
    return functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key,
        value,
        attn_mask=bias,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    ).transpose(1, 2)


def _attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    num_pieces, query_len, _, head_dim = query.shape
    grouped = query.view(num_pieces, query_len, key.shape[1], -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(grouped.float() * scale, key.float().transpose(-1, -2)[:, :, None])
    scores = torch.tanh_(scores.div_(soft_cap)).mul_(soft_cap)
    if bias is not None:
        scores += bias[:, :, None]
    attended = torch.matmul(scores.softmax(dim=-1), value.float()[:, :, None])
    return attended.permute(0, 3, 1, 2, 4).to(query.dtype).reshape(query.shape)
