"""Draws against exact probabilities. Seeds are fixed: every run sees the same draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from legato_worker.core.batch import Sample
from legato_worker.core.request import SamplingParams
from legato_worker.sampling.sampler import Sampler

from tests.property import sampling_oracle as oracle
from tests.unit.sampling_cases import CPU, attached, draws

Item = TypeVar("Item", bound=Hashable)

NUM_DRAWS = 20_000
LOGITS = torch.randn(1, 24, generator=torch.Generator().manual_seed(40)) * 2


def _agree(observed: Iterable[Item], expected: Mapping[Item, float]) -> None:
    """Pearson's chi-square, small cells pooled; 4 standard deviations above its mean fails (about 1
    in 10,000 for a fair sampler, and the draws are fixed)."""
    counts = Counter(observed)
    total = sum(counts.values())
    assert set(counts) <= set(expected), "an id that cannot be drawn was drawn"
    cells: list[tuple[float, float]] = []
    pooled = [0.0, 0.0]
    for item, share in expected.items():
        if share * total < 5:
            pooled[0] += counts[item]
            pooled[1] += share * total
        else:
            cells.append((counts[item], share * total))
    if pooled[1]:
        cells.append((pooled[0], pooled[1]))
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=2.0, min_p=0.2),
        SamplingParams(temperature=1.5, top_k=8, top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.95, min_p=0.1),
        SamplingParams(temperature=2.5, top_k=12, top_p=0.9, min_p=0.15),
        SamplingParams(temperature=1.0, repetition_penalty=1.5, allowed_token_ids=(1, 2, 3, 4, 5)),
    ],
)
def test_draws_follow_the_exact_probabilities(params: SamplingParams) -> None:
    """The cuts are in the oracle's order; a wrong order or temperature gives other shares."""
    row = attached(params)
    expected = oracle.probabilities(LOGITS[0].numpy(), row)
    if params.repetition_penalty == 1.0:
        ids = draws(LOGITS, params, NUM_DRAWS)
    else:  # penalties count the prompt: one slot for each draw, attached with its own seed
        sampler = Sampler(24, 1, CPU)
        ids = []
        for seed in range(3000):
            sampler.attach(attached(replace(params, seed=seed)))
            ids += sampler.sample(LOGITS, [Sample(0, 0, 3)]).token_ids
    _agree(ids, expected)


def test_the_wrong_distribution_is_noticed() -> None:
    """The test above can fail: draws at another temperature do not pass for these."""
    expected = oracle.probabilities(LOGITS[0].numpy(), attached(SamplingParams(temperature=1.0)))
    with pytest.raises(AssertionError):
        _agree(draws(LOGITS, SamplingParams(temperature=1.05), NUM_DRAWS), expected)


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_neighbouring_streams_are_independent(varied: str) -> None:
    """Pairs of draws whose seed, choice or position differ by 1 fill the table of all pairs evenly,
    as independent draws do."""
    flat = torch.zeros(1, 8)

    def stream(seed: int = 17, choice: int = 0) -> list[int]:
        return draws(flat, SamplingParams(temperature=1.0, seed=seed), NUM_DRAWS, choice)

    first = stream()
    second = {
        "seed": lambda: stream(seed=18),
        "choice": lambda: stream(choice=1),
        "position": lambda: first[1:],
    }[varied]()
    pairs = list(zip(first, second, strict=False))
    _agree(pairs, {(a, b): 1 / 64 for a in range(8) for b in range(8)})


def test_first_tokens_of_many_seeds_are_fair() -> None:
    """Seeds 0, 1, 2, ... at one position: what many requests without history see."""
    sampler = Sampler(24, 4000, CPU)
    for seed in range(4000):
        sampler.attach(attached(SamplingParams(temperature=1.0, seed=seed), slot=seed))
    out = sampler.sample(LOGITS.expand(4000, -1), [Sample(i, i, 3) for i in range(4000)])
    row = attached(SamplingParams(temperature=1.0))
    _agree(out.token_ids, oracle.probabilities(LOGITS[0].numpy(), row))


def test_the_tail_of_a_large_vocabulary_has_its_share() -> None:
    """30,000 ids that together hold 10 %, each 3e-6: noise with too few bits would lose them."""
    logits = torch.zeros(1, 30_001)
    logits[0, 15_000] = math.log(9 * 30_000)
    ids = draws(logits, SamplingParams(temperature=1.0, seed=2), 1500)
    tail = [token_id for token_id in ids if token_id != 15_000]
    assert abs(len(tail) - 150) < 4 * math.sqrt(1500 * 0.1 * 0.9)
    _agree([token_id * 4 // 30_001 for token_id in tail], dict.fromkeys(range(4), 0.25))
