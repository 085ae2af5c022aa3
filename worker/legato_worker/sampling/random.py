"""Counter-based random numbers: each is a pure function of (seed, choice, position, token id).

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), read by index instead of by turns: output n of seed s is
``mix(s + (n + 1) * GAMMA)``. It is nested: output ``choice`` of the request's seed is the seed of
that choice, whose output ``position`` is the key of that position, whose output ``token id`` is the
number of that token. No state exists that a batch, a preemption or a move could disturb.

All arithmetic is on 64-bit words, modulo 2**64. Tensors hold the words as int64, since torch has
no arithmetic for uint64.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB


def output(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's outputs number ``indices`` (from 0) of ``seeds``, elementwise."""
    one, gamma = np.uint64(1), np.uint64(_GAMMA)
    z: NDArray[np.uint64] = seeds + (indices + one) * gamma
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTOR_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return z ^ (z >> np.uint64(31))


def increments(vocab_size: int, device: torch.device) -> Tensor:
    """``(token id + 1) * GAMMA`` of every token id: int64 ``[vocab_size]``."""
    return torch.arange(1, vocab_size + 1, device=device) * _signed(_GAMMA)


def words(keys: Tensor, steps: Tensor) -> Tensor:
    """Outputs of the seeds ``keys`` (int64 ``[R, 1]``) at ``steps`` (rows or one row of
    :func:`increments`): a new int64 tensor of the broadcast shape."""
    z = keys + steps
    for shift, factor in ((30, _FACTOR_1), (27, _FACTOR_2)):
        z.bitwise_xor_(_shifted(z, shift)).mul_(_signed(factor))
    return z.bitwise_xor_(_shifted(z, 31))


def gumbel(keys: Tensor, steps: Tensor) -> Tensor:
    """Standard Gumbel noise: float32 of the shape of :func:`words`, always finite.

    ``-log(-log1p(-u))`` with u in (0, 1) made of 63 bits. This end of the logarithm resolves small
    u, from which winners come, down to 2**-64, so even the least likely of a large vocabulary keeps
    its own chance; u is bounded below 1 so that a token without rivals cannot be lost.
    """
    u = words(keys, steps).bitwise_and_((1 << 63) - 1).to(torch.float32)
    u.add_(0.5).mul_(2.0**-63).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _shifted(z: Tensor, count: int) -> Tensor:
    """Logical shift right: torch shifts int64 arithmetically."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
