"""Log probabilities of the model itself: before temperature, penalties, masks and cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.batch import TokenLogprobs
from .rows import best_ids, order_keys, rows_per_block, weight_bits, weights

LOGPROB_FLOOR = -9999.0
"""Stands for the log of a probability of 0, so that every value told is finite."""


def token_logprobs(logits: Tensor, ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log probability and rank of ``ids[i]`` in row i, and the ``num_top[i]`` most likely ids.

    ``logits``: float32 ``[R, V]``, unchanged; ``ids``: int64 ``[R]`` on the same device. The most
    likely come best first, the lowest id first on a tie, and rank counts in that order; ids of
    probability 0 are left out. Rows must hold neither NaN nor +inf, and something above -inf.
    """
    step = rows_per_block(logits.shape[-1], logits.device)
    told: list[TokenLogprobs] = []
    for start in range(0, len(logits), step):
        stop = start + step
        told += _block(logits[start:stop], ids[start:stop], num_top[start:stop])
    return told


def prompt_logprobs(
    logits: Tensor, next_ids: Tensor | Sequence[int], k: int
) -> list[TokenLogprobs]:
    """The same for a prompt: row p of ``logits`` (``[P, V]``) tells of ``next_ids[p]``, the id that
    the prompt has next, and of the ``k`` most likely ids in its place."""
    ids = torch.as_tensor(next_ids, dtype=torch.int64, device=logits.device)
    return token_logprobs(logits, ids, [k] * len(logits))


def _block(logits: Tensor, ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    vocab_size = logits.shape[-1]
    gaps = logits - logits.amax(dim=-1, keepdim=True)
    bits = weight_bits(vocab_size)
    mass = weights(gaps, bits).sum(dim=-1, keepdim=True)
    log_mass = mass.to(torch.float64).log_().sub_(bits * math.log(2))

    order = order_keys(gaps)
    column = ids.unsqueeze(-1)
    ranks = (order < order.gather(-1, column)).sum(dim=-1).add_(1).tolist()
    widest = min(vocab_size, max(num_top))
    listed = torch.cat([column, best_ids(order, widest)], dim=-1) if widest else column
    log_probs = (gaps.gather(-1, listed).to(torch.float64) - log_mass).to(torch.float32).tolist()

    told: list[TokenLogprobs] = []
    for (_, *top_ids), (own, *top), rank, k in zip(
        listed.tolist(), log_probs, ranks, num_top, strict=True
    ):
        finite = sum(value > -math.inf for value in top[:k])
        told.append(
            TokenLogprobs(
                logprob=max(own, LOGPROB_FLOOR),
                rank=rank,
                top_ids=tuple(top_ids[:finite]),
                top_logprobs=tuple(top[:finite]),
            )
        )
    return told
