"""Draws from rows of scaled logits after top-k, top-p and min-p."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .random import gumbel
from .rows import best_ids, order_keys, weight_bits, weights

_CANDIDATES = (256, 4096)
"""Numbers of candidates to try before a row's whole vocabulary is sorted. The cut of nearly every
real distribution lies within the first; selecting them costs a fortieth of a sort."""
_NO_LIMIT = (1 << 63) - 1


class Cuts(NamedTuple):
    """Parameters of R rows as columns ``[R, 1]``: ``top_k`` int64 in 1..V (V = off), ``top_p``
    float64 (1 = off), ``log_min_p`` float32 (-inf = off), and ``keys`` of the draws, int64."""

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    keys: Tensor


def draw_from_all(gaps: Tensor, cuts: Cuts, steps: Tensor) -> Tensor:
    """One id per row, int64 ``[R]``, for rows with at most min-p: no order is needed.

    ``gaps`` (see :mod:`.rows`) is overwritten. ``steps``: :func:`.random.increments`.
    """
    noise = gumbel(cuts.keys, steps)
    gaps.masked_fill_(gaps < cuts.log_min_p, -torch.inf)
    return noise.add_(gaps).argmax(dim=-1)


def draw_from_best(gaps: Tensor, cuts: Cuts, steps: Tensor, max_top_k: int) -> Tensor:
    """One id per row, int64 ``[R]``, for rows that all have top-k, or all have top-p without top-k.

    ``max_top_k`` is the largest entry of ``cuts.top_k`` (V = top-k off). Rows whose cut lies beyond
    the candidates tried are tried again with more.
    """
    vocab_size = gaps.shape[-1]
    bits = weight_bits(vocab_size)
    order = order_keys(gaps)
    mass = weights(gaps, bits).sum(dim=-1, keepdim=True) if max_top_k == vocab_size else None
    drawn = torch.empty(len(gaps), dtype=torch.int64, device=gaps.device)
    waiting = torch.arange(len(gaps), device=gaps.device)
    for limit in (*_CANDIDATES, vocab_size):
        num_candidates = min(limit, max_top_k)
        ids = best_ids(order[waiting], num_candidates)
        values = gaps[waiting].gather(-1, ids)
        part = Cuts(*(column[waiting] for column in cuts))
        keep, covered = _keep(values, part, None if mass is None else mass[waiting], bits)
        score = gumbel(part.keys, steps[ids]).add_(values).masked_fill_(~keep, -torch.inf)
        drawn[waiting] = ids.gather(-1, score.argmax(dim=-1, keepdim=True)).squeeze(-1)
        if num_candidates == max_top_k:
            break  # no cut lies beyond
        waiting = waiting[~covered]
        if not len(waiting):
            break
    return drawn


def _keep(values: Tensor, cuts: Cuts, mass: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """Which of the candidates ``values`` (``[R, C]``, best first) survive, bool ``[R, C]``, and
    whether all survivors of a row are among them, bool ``[R]``.

    ``mass``: weight of each row's whole vocabulary, ``[R, 1]``; None = the rows have top-k.
    """
    num_candidates = values.shape[-1]
    weight = weights(values, bits)
    total = weight.cumsum(dim=-1)
    in_top_k = torch.arange(num_candidates, device=values.device) < cuts.top_k
    whole = total.gather(-1, cuts.top_k.clamp(max=num_candidates) - 1) if mass is None else mass
    share = whole.to(torch.float64).mul_(cuts.top_p).ceil_().to(torch.int64)
    limit = torch.where(cuts.top_p < 1, share, _NO_LIMIT)
    keep = in_top_k & (total - weight < limit) & (values >= cuts.log_min_p)
    covered = cuts.top_k <= num_candidates if mass is None else total[:, -1:] >= limit
    return keep, covered.squeeze(-1)
