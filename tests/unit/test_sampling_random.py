"""The counter-based random numbers."""

from __future__ import annotations

import math

import numpy as np
import torch
from legato_worker.sampling.random import gumbel, increments, output, words

from tests.property import sampling_oracle as oracle
from tests.unit.sampling_cases import CPU


def test_reference_vector_of_splitmix64() -> None:
    """The first outputs of the published C program for seed 1234567."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    seeds = np.full(5, 1234567, np.uint64)
    assert output(seeds, np.arange(5, dtype=np.uint64)).tolist() == expected
    assert [oracle.splitmix64(1234567, i) for i in range(5)] == expected


def test_tensor_words_equal_the_integers() -> None:
    """int64 arithmetic, arithmetic shifts and all, gives the unsigned words."""
    seeds = [0, 1, 42, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    keys = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)).unsqueeze(-1)
    got = words(keys, increments(1000, CPU)).numpy().view(np.uint64)
    expected = [[oracle.splitmix64(seed, i) for i in range(1000)] for seed in seeds]
    assert got.tolist() == expected


def test_noise_is_gumbel_and_finite() -> None:
    """Mean, variance and quantiles of 2 million values; a short vocabulary gathered out of order
    gives the same values."""
    keys = torch.arange(20).unsqueeze(-1) * 7919
    steps = increments(100_000, CPU)
    values = gumbel(keys, steps)
    assert values.isfinite().all()
    assert abs(values.mean().item() - 0.5772157) < 3e-3
    assert abs(values.var().item() - math.pi**2 / 6) < 1e-2
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999, 0.99999):
        below = (values < -math.log(-math.log(quantile))).double().mean().item()
        assert abs(below - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / values.numel())
    ids = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))[:777]
    assert torch.equal(gumbel(keys, steps[ids]), values[:, ids])


def test_noise_is_finite_at_both_ends_of_its_words() -> None:
    """Words of all zeros and all ones, found by running the mixer backwards from them."""
    for word in (0, (1 << 64) - 1, (1 << 63) - 1, 1 << 63):
        key = _unmixed(word)
        keys = torch.tensor([[key - (1 << 64) if key >> 63 else key]])
        steps = torch.zeros(1, dtype=torch.int64)
        assert words(keys, steps).item() % (1 << 64) == word
        assert -3 < gumbel(keys, steps).item() < 45


def test_seed_choice_and_position_each_give_other_words() -> None:
    """10,000 neighbouring (seed, choice, position) have 10,000 different keys."""
    seeds, choices, positions = np.meshgrid(
        np.arange(25, dtype=np.uint64),
        np.arange(20, dtype=np.uint64),
        np.arange(20, dtype=np.uint64),
    )
    keys = output(output(seeds.ravel(), choices.ravel()), positions.ravel())
    assert len(set(keys.tolist())) == 10_000


def _unmixed(word: int) -> int:
    mask = (1 << 64) - 1

    def unshifted(z: int, count: int) -> int:
        x = z
        for _ in range(64 // count + 1):
            x = z ^ (x >> count)
        return x

    z = unshifted(word, 31)
    z = unshifted(z * pow(0x94D049BB133111EB, -1, 1 << 64) & mask, 27)
    return unshifted(z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask, 30)
