"""How a step's attention is cut into calls. Made once per step and window, used by every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..paged import PagedStep

_TILE = 128
"""Longest piece of a row that attends in one call. A tile sees no key behind its own end, so that
half of a long prompt's scores are never computed, and its bias stays small."""

_PADDING_ELEMENTS = 1 << 17
"""Single queries share a call until the key elements that padding adds reach this many: reading
those costs about as much as one more call (measured with SmolLM2's heads on 2 cores)."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """N pieces of Q queries each, over L gathered keys each.

    - ``tokens`` [N * Q] int64: the queries among the packed tokens
    - ``key_slots`` [N * L] int64: their keys and values in the pool. A piece with fewer than L keys
      repeats its last one, so that nothing outside its context is ever read.
    - ``bias`` [N, 1, Q, L]: 0, or -inf where a query may not see a key; None = all see all
    """

    tokens: torch.Tensor
    key_slots: torch.Tensor
    bias: torch.Tensor | None
    num_pieces: int
    query_len: int
    num_keys: int


class _Piece(NamedTuple):
    """Queries from packed token ``first`` on; the keys they see lie at positions begin .. end - 1,
    where the last query's position is end - 1."""

    row: int
    first: int
    num_queries: int
    begin: int
    end: int

    @property
    def num_keys(self) -> int:
        return self.end - self.begin


def plan_attention(
    step: PagedStep,
    cache_shape: torch.Size,
    window: int | None,
    dtype: torch.dtype,
    *,
    singles: bool = True,
) -> list[AttentionCall]:
    """Long rows are cut into tiles, one call each; single queries are batched by length, or left
    out if ``singles`` is False (rows of one query only, not the last query of a tiled row).

    ``cache_shape``: that of a layer's key cache. ``dtype``: of the queries and of the bias.
    """
    _, block_size, num_kv_heads, head_dim = cache_shape
    batches: list[list[_Piece]] = []
    short: list[_Piece] = []
    for piece in _pieces(step, window, singles=singles):
        if piece.num_queries == 1:
            short.append(piece)
        else:
            batches.append([piece])
    batches.extend(_buckets(short, _PADDING_ELEMENTS // (num_kv_heads * head_dim)))
    return [_call(batch, step, block_size, window, dtype) for batch in batches]


def _pieces(step: PagedStep, window: int | None, *, singles: bool) -> Iterator[_Piece]:
    query_start = step.query_start.tolist()
    for row, context_len in enumerate(step.context_lens.tolist()):
        last = query_start[row + 1]
        if not singles and last - query_start[row] == 1:
            continue
        for first in range(query_start[row], last, _TILE):
            num_queries = min(_TILE, last - first)
            end = context_len - (last - first - num_queries)
            begin = 0 if window is None else max(0, end - num_queries + 1 - window)
            yield _Piece(row, first, num_queries, begin, end)


def _buckets(singles: list[_Piece], max_padding: int) -> Iterator[list[_Piece]]:
    bucket: list[_Piece] = []
    padding = 0
    for piece in sorted(singles, key=lambda piece: -piece.num_keys):
        padding += bucket[0].num_keys - piece.num_keys if bucket else 0
        if padding > max_padding:
            yield bucket
            bucket, padding = [], 0
        bucket.append(piece)
    if bucket:
        yield bucket


def _call(
    pieces: list[_Piece], step: PagedStep, block_size: int, window: int | None, dtype: torch.dtype
) -> AttentionCall:
    query_len = pieces[0].num_queries
    num_keys = max(piece.num_keys for piece in pieces)
    rows, firsts, _, begins, ends = torch.tensor(pieces).unsqueeze(-1).unbind(1)  # each [N, 1]
    offsets = torch.arange(query_len)
    positions = begins + torch.arange(num_keys)
    readable = torch.minimum(positions, ends - 1)
    tables = step.block_tables.index_select(0, rows.flatten())
    blocks = tables.gather(1, readable.div(block_size, rounding_mode="floor")).long()

    keys = positions[:, None, None, :]
    queries = (ends - query_len + offsets)[:, None, :, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    bias = None
    if hidden.any():
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return AttentionCall(
        tokens=(firsts + offsets).flatten(),
        key_slots=(blocks * block_size + readable % block_size).flatten(),
        bias=bias,
        num_pieces=len(pieces),
        query_len=query_len,
        num_keys=num_keys,
    )
