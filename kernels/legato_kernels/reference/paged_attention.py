from __future__ import annotations

import torch

from ..paged import PagedStep


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
    """Causal attention of packed queries [T, num_heads, head_dim] over their own rows' KV, which
    holds this step's tokens already. Returns the queries' shape and type.

    - Grouped heads: query head h reads KV head ``h // (num_heads // num_kv_heads)``.
    - ``sliding_window`` W: position p sees the W positions p - W + 1 .. p.
    - ``soft_cap`` c: scores s become ``c * tanh(s / c)`` before the softmax (Gemma 2).

    What lies in the pool outside a row's context has no influence, NaN included.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads
    output = torch.empty_like(query)
    for row, context_len in enumerate(step.context_lens.tolist()):
        first, end = step.query_start[row : row + 2].tolist()
        for token in range(first, end):
            position = context_len - (end - token)
            begin = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            keys, values = [], []
            for seen in range(begin, position + 1):
                block = int(step.block_tables[row, seen // block_size])
                keys.append(key_cache[block, seen % block_size])
                values.append(value_cache[block, seen % block_size])
            for head in range(query.shape[1]):
                key = torch.stack([k[head // group] for k in keys]).float()
                value = torch.stack([v[head // group] for v in values]).float()
                scores = key @ query[token, head].float() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                output[token, head] = (scores.softmax(dim=0) @ value).to(query.dtype)
    return output
