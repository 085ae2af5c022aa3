"""The sampler's contract again, one row at a time, in plain Python and float64.

Written for plainness, sharing no code with the worker's sampler: where the two disagree, one of
them is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from legato_worker.core.batch import AttachedRow
from numpy.typing import NDArray

_WORD = (1 << 64) - 1


def splitmix64(seed: int, index: int) -> int:
    """Output number ``index`` of SplitMix64."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def noise(seed: int, choice: int, position: int, token_id: int) -> float:
    """Gumbel noise of one token."""
    word = splitmix64(splitmix64(splitmix64(seed, choice), position), token_id)
    u = ((word & (_WORD >> 1)) + 0.5) * 2.0**-63
    return -math.log(-math.log1p(-min(u, 1 - 2.0**-24)))


def processed(logits: NDArray[np.float32], row: AttachedRow, position: int) -> NDArray[np.float64]:
    """Logits after bias, masks and penalties; ``row.token_ids`` reach up to ``position``."""
    params = row.sampling
    x = logits.astype(np.float64)
    for token_id, bias in params.logit_bias:
        x[token_id] += bias
    if params.allowed_token_ids:
        for token_id in range(len(x)):
            if token_id not in params.allowed_token_ids:
                x[token_id] = -math.inf
    for token_id in params.bad_token_ids:
        x[token_id] = -math.inf
    if position - row.num_prompt < row.min_tokens:
        for token_id in row.stop_token_ids:
            x[token_id] = -math.inf
    for token_id in set(row.token_ids):
        if x[token_id] > 0:
            x[token_id] /= params.repetition_penalty
        else:
            x[token_id] *= params.repetition_penalty
    for token_id, count in Counter(row.token_ids[row.num_prompt :]).items():
        x[token_id] -= params.presence_penalty + count * params.frequency_penalty
    return x


@dataclass(frozen=True)
class Kept:
    """Scaled gaps to the best logit, and the ids that survive the cuts."""

    gaps: NDArray[np.float64]
    ids: list[int]


def cut(x: NDArray[np.float64], row: AttachedRow, slack: float = 0.0) -> Kept:
    """Temperature, top-k, top-p, min-p. ``slack`` > 0 widens the last two, < 0 narrows them: what
    lies between may fall either way in float32."""
    params = row.sampling
    gaps = (x - x.max()) / params.temperature
    order = sorted((i for i in range(len(x)) if gaps[i] > -math.inf), key=lambda i: (-gaps[i], i))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        whole = sum(math.exp(gaps[i]) for i in order)
        nucleus: list[int] = []
        share = 0.0
        for i in order:
            if nucleus and share >= params.top_p + slack:
                break
            nucleus.append(i)
            share += math.exp(gaps[i]) / whole
        order = nucleus
    if params.min_p > 0:
        floor = min(1.0, params.min_p * (1 - slack))
        order = [i for i in order if math.exp(gaps[i]) >= floor]
    return Kept(gaps, order)


def probabilities(logits: NDArray[np.float32], row: AttachedRow) -> dict[int, float]:
    """Exact chance of each id that can be drawn."""
    kept = cut(processed(logits, row, len(row.token_ids)), row)
    weight = {i: math.exp(kept.gaps[i]) for i in kept.ids}
    whole = sum(weight.values())
    return {i: w / whole for i, w in weight.items()}


def check(logits: NDArray[np.float32], row: AttachedRow, token_id: int) -> None:
    """Asserts that ``token_id`` is what the contract gives after ``row.token_ids``, up to what
    float32 cannot tell apart."""
    position = len(row.token_ids)
    x = processed(logits, row, position)
    assert x[token_id] > -math.inf, "a masked id was chosen"
    if row.sampling.temperature == 0:
        first_best = int(x.argmax())
        assert token_id == first_best or x[token_id] >= x.max() - 1e-4 * max(1, abs(x.max()))
        return
    surely, perhaps = cut(x, row, -1e-5), cut(x, row, 1e-5)
    assert token_id in perhaps.ids, "an id outside the cut was chosen"

    def score(i: int) -> float:
        return float(surely.gaps[i]) + noise(row.sampling.seed, row.choice, position, i)

    best = max(score(i) for i in surely.ids)
    slack = 1e-4 * (1 + abs(float(surely.gaps[token_id])) + 1 / row.sampling.temperature)
    assert score(token_id) >= best - slack, "another id had the better score"
