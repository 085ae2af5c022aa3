"""Primitives on rows of logits whose result for a row depends on that row alone, bit for bit.

They are given *gaps*: float32 ``[R, V]``, each row minus its own maximum, so that every value is at
most 0 and the best is 0. Order and sums are computed on integers: an order with no ties and sums
that are exact, hence equal whatever the shape of the batch, the threads, or the device's way to
reduce. (Floating-point sums are not: torch splits the reduction of one row and of many rows
differently.)
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = {"cpu": 1 << 19}
_BLOCK_ELEMENTS_ELSEWHERE = 1 << 24
_ID_MASK = (1 << 32) - 1


def rows_per_block(vocab_size: int, device: torch.device) -> int:
    """How many rows to work on at a time: enough to keep the device busy, few enough that the dozen
    passes over them find their operands in a CPU's cache, or leave an accelerator its memory."""
    return max(1, _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS_ELSEWHERE) // vocab_size)


def order_keys(gaps: Tensor) -> Tensor:
    """int64 ``[R, V]``, all different: lower is more likely, and the lower id comes first on a tie.

    The bits of a non-negative float grow with its value, so they sort as an integer.
    """
    size_bits = gaps.abs().view(torch.int32).to(torch.int64)
    return size_bits.bitwise_left_shift_(32).bitwise_or_(
        torch.arange(gaps.shape[-1], device=gaps.device)
    )


def best_ids(keys: Tensor, num_ids: int) -> Tensor:
    """The ``num_ids`` most likely ids of each row, best first: int64 ``[R, num_ids]``.

    ``keys`` are :func:`order_keys`. A full sort happens only when all ids are wanted.
    """
    if num_ids == keys.shape[-1]:
        best = keys.sort(dim=-1).values
    else:
        best = keys.topk(num_ids, dim=-1, largest=False, sorted=True).values
    return best.bitwise_and_(_ID_MASK)


def weight_bits(vocab_size: int) -> int:
    """Scale of :func:`weights` such that a sum over the vocabulary stays below 2**62."""
    return 62 - vocab_size.bit_length()


def weights(gaps: Tensor, bits: int) -> Tensor:
    """``floor(exp(gaps) * 2**bits)`` as int64: probabilities up to a factor, with exact sums.

    With 50,000 tokens ``bits`` is 46: what is cut off weighs less than 1e-9 of the whole.
    """
    return gaps.exp().mul_(2.0**bits).to(torch.int64)
