"""Order and sums that depend on the row alone."""

from __future__ import annotations

import torch
from legato_worker.sampling.rows import best_ids, order_keys, weight_bits, weights

from tests.unit.sampling_cases import logits_like


def test_best_ids_put_the_lowest_id_first_on_ties() -> None:
    """With many equal values and infinities, by selection and by full sort."""
    source = torch.Generator().manual_seed(3)
    gaps = -torch.randint(0, 6, (7, 501), generator=source).float()
    gaps[:, ::50] = -torch.inf
    for row, expected_from in enumerate(gaps.tolist()):
        expected = sorted(range(501), key=lambda i: (-expected_from[i], i))
        keys = order_keys(gaps[row : row + 1])
        for num_ids in (1, 17, 300, 500, 501):
            assert best_ids(keys, num_ids).tolist() == [expected[:num_ids]]


def test_order_tells_neighbouring_floats_apart() -> None:
    smallest = torch.tensor([0.0, -1e-45, -3e-45, -1.0, -1.0000001, -3e38, -torch.inf])
    shuffled = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    ids = best_ids(order_keys(smallest[shuffled].unsqueeze(0)), 7)[0]
    assert shuffled[ids].tolist() == list(range(7))


def test_sums_are_equal_in_every_batch_shape() -> None:
    """Alone, among others, and with the vocabulary in another order: the same integer. A float32
    sum of the same numbers does not have this property."""
    logits = logits_like(33, 50257, seed=1)
    gaps = logits - logits.amax(dim=-1, keepdim=True)
    bits = weight_bits(50257)
    together = weights(gaps, bits).sum(dim=-1)
    order = torch.randperm(50257, generator=torch.Generator().manual_seed(0))
    for row in range(33):
        assert weights(gaps[row : row + 1], bits).sum() == together[row]
        assert weights(gaps[row, order], bits).sum() == together[row]
    floats = gaps.exp()
    assert (floats[:, order].sum(dim=-1) != floats.sum(dim=-1)).any()


def test_sums_cannot_overflow() -> None:
    for vocab_size in (1, 2, 49152, 151936, 1 << 20):
        heaviest = weights(torch.zeros(1, vocab_size), weight_bits(vocab_size)).sum().item()
        assert 0 < heaviest <= 1 << 62
