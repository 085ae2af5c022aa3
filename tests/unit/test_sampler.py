"""The sampler: masks, cuts, and the isolation of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from legato_worker.core.batch import Sample
from legato_worker.core.request import GREEDY, SamplingParams
from legato_worker.sampling.sampler import SampleOutput, Sampler

from tests.unit.sampling_cases import CPU, KINDS, attached, draws, logits_like, sample_rows, threads


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.zeros(3, 50257)
    logits[0, [49000, 312, 313]] = 1.0
    logits[2, [50256, 50255]] = 1.0
    assert sample_rows(logits, [attached(slot=i) for i in range(3)]).token_ids == [312, 0, 50255]


def test_top_k_one_is_greedy_even_on_a_tie() -> None:
    """And so is top-k 1 next to rows with larger k, and a tiny top-p or temperature."""
    logits = torch.zeros(4, 100)
    logits[:, [60, 61, 62]] = 3.0
    rows = [
        attached(SamplingParams(temperature=5.0, top_k=1, seed=9), slot=0),
        attached(SamplingParams(temperature=1.0, top_k=5, seed=9), slot=1),
        attached(SamplingParams(temperature=5.0, top_p=1e-9, seed=9), slot=2),
        attached(SamplingParams(temperature=1e-30, top_k=1, seed=9), slot=3),
    ]
    ids = sample_rows(logits, rows).token_ids
    assert (ids[0], ids[2], ids[3]) == (60, 60, 60)


@pytest.mark.parametrize("temperature", [1e-50, 1e-38, 1e-6])
def test_temperatures_near_zero_take_the_best(temperature: float) -> None:
    logits = logits_like(1, 1000, seed=5)
    params = SamplingParams(temperature=temperature, seed=1)
    assert set(draws(logits, params, 20)) == {int(logits.argmax())}


def test_top_k_off_on_and_beyond_the_vocabulary_in_one_batch() -> None:
    """B040: rows with top-k 0, 64 and 10**7 side by side: each is as if alone, off means all, and
    a k beyond the vocabulary means all too."""
    logits = logits_like(1, 5000, seed=6)
    off, some, huge = (
        SamplingParams(temperature=1.5, top_k=k, seed=11) for k in (0, 64, 10_000_000)
    )
    rows = [attached(off, slot=0), attached(some, slot=1), attached(huge, slot=2)]
    together = sample_rows(logits.expand(3, -1), rows).token_ids
    alone = [sample_rows(logits, [row]).token_ids[0] for row in rows]
    assert together == alone
    assert draws(logits, off, 500) == draws(logits, huge, 500)
    best = set(logits[0].topk(64).indices.tolist())
    assert set(draws(logits, some, 500)) <= best
    assert not set(draws(logits, off, 500)) <= best


def test_top_p_of_each_row_is_its_own() -> None:
    """B041: two rows with different top-p and far apart favourites, in both orders: an id always
    lies in the nucleus of its own row."""
    logits = torch.full((2, 1000), -20.0)
    logits[0, 100:110] = torch.arange(10) * 0.1
    logits[1, 700:790] = torch.arange(90) * 0.01
    wide = SamplingParams(temperature=1.0, top_p=0.95, seed=1)
    narrow = SamplingParams(temperature=1.0, top_p=0.2, seed=2)
    nuclei = (set(range(108, 110)), set(range(700, 790)))
    sampler = Sampler(1000, 2, CPU)
    sampler.attach(attached(narrow, slot=0))
    sampler.attach(attached(wide, slot=1))
    seen: list[set[int]] = [set(), set()]
    for position in range(3, 200):
        forth = sampler.sample(logits, [Sample(0, 0, position), Sample(1, 1, position)])
        back = sampler.sample(logits.flip(0), [Sample(0, 1, position), Sample(1, 0, position)])
        assert forth.token_ids == back.token_ids[::-1]
        for row, token_id in enumerate(forth.token_ids):
            seen[row].add(token_id)
    assert seen[0] == nuclei[0]  # 0.2 of ten nearly equal ids: the best two
    assert seen[1] <= nuclei[1] and len(seen[1]) > 50


def test_top_p_shares_are_of_what_the_rows_own_top_k_left() -> None:
    """Equal logits: 0.7 of the first 5 ids is 4 ids, whatever k the mates have."""
    logits = torch.zeros(2, 1000)
    sampler = Sampler(1000, 2, CPU)
    sampler.attach(attached(SamplingParams(temperature=1.0, top_k=5, top_p=0.7, seed=1), slot=0))
    sampler.attach(attached(SamplingParams(temperature=1.0, top_k=200, seed=1), slot=1))
    seen = {
        sampler.sample(logits, [Sample(0, 0, position), Sample(1, 1, position)]).token_ids[0]
        for position in range(3, 103)
    }
    assert seen == {0, 1, 2, 3}


def test_nucleus_may_be_wider_than_any_candidate_list() -> None:
    """Flat logits: half of 12,000 ids is beyond the first tries, and exact all the same."""
    logits = torch.zeros(1, 12_000)
    ids = set(draws(logits, SamplingParams(temperature=1.0, top_p=0.5, seed=1), 150))
    assert 5_800 < max(ids) < 6_000  # ties: the lower half of the ids
    wide_k = SamplingParams(temperature=1.0, top_k=7000, seed=1)
    ids = set(draws(logits, wide_k, 150))
    assert 6800 < max(ids) < 7000


def test_seeded_row_does_not_depend_on_its_mates() -> None:
    """B043: a row with seed 42, alone and with a mate of another seed, in both orders, four times
    over: the same id every time, and the mate's choice leaves it alone."""
    logits = logits_like(2, 2000, seed=7)
    a = attached(SamplingParams(temperature=1.0, seed=42), slot=0)
    ids = {sample_rows(logits[:1], [a]).token_ids[0]}
    for seed in (0, 1, 7, 1 << 63):
        b = attached(SamplingParams(temperature=1.0, seed=seed), slot=1)
        ids.add(sample_rows(logits, [a, b]).token_ids[0])
        ids.add(sample_rows(logits.flip(0), [b, a]).token_ids[1])
    assert len(ids) == 1


def test_choices_of_one_seed_draw_different_streams() -> None:
    """B044 (the sampler's part): 8 choices of one prompt and seed share the logits, not the draws;
    other seeds give other draws, and the same ones repeat."""
    logits = torch.zeros(1, 1000)
    params = SamplingParams(temperature=1.0, seed=5)
    streams = [tuple(draws(logits, params, 50, choice)) for choice in range(8)]
    assert len(set(streams)) == 8
    for one in streams:
        for other in streams:
            same = sum(x == y for x, y in zip(one, other, strict=True))
            assert same == 50 if one is other else same < 5
    assert streams[0] != tuple(draws(logits, SamplingParams(temperature=1.0, seed=6), 50))
    assert streams[0] == tuple(draws(logits, params, 50))


def test_no_stop_id_before_min_tokens() -> None:
    """B046 (ids): with two end-of-sequence ids and a stop id far above all others, none comes
    before min_tokens outputs, and the best comes right then; greedy and sampled."""
    logits = torch.zeros(1, 64)
    logits[0, [10, 20, 30]] = torch.tensor([30.0, 29.0, 28.0])
    for params in (GREEDY, SamplingParams(temperature=1.0, top_k=2, seed=1)):
        sampler = Sampler(64, 1, CPU)
        sampler.attach(attached(params, stop=(10, 20, 30), min_tokens=20))
        ids = [sampler.sample(logits, [Sample(0, 0, 3 + i)]).token_ids[0] for i in range(25)]
        assert not set(ids[:20]) & {10, 20, 30}
        assert set(ids[20:]) <= {10, 20}
    resumed = attached(stop=(10, 20, 30), min_tokens=20, outputs=[0] * 20)
    assert sample_rows(logits, [resumed]).token_ids == [10]


def test_bias_allowed_and_bad_ids() -> None:
    logits = logits_like(1, 200, seed=8)
    order = logits[0].argsort(descending=True).tolist()
    best, second, worst = order[0], order[1], order[-1]
    cases = {
        worst: SamplingParams(logit_bias=((worst, 100.0),)),
        second: SamplingParams(bad_token_ids=(best,)),
        order[5]: SamplingParams(allowed_token_ids=(worst, order[5], order[9])),
        order[9]: SamplingParams(
            allowed_token_ids=(worst, order[5], order[9]), bad_token_ids=(order[5],)
        ),
        order[3]: SamplingParams(logit_bias=((order[3], 50.0), (order[3], 50.0), (best, 60.0))),
    }
    rows = [attached(params, slot=slot) for slot, params in enumerate(cases.values())]
    assert sample_rows(logits.expand(len(rows), -1), rows).token_ids == list(cases)


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    """Prompt ids, bias, bans and stop ids that no logit belongs to must not index past the row,
    least of all into the next one."""
    logits = logits_like(2, 100, seed=9)
    params = SamplingParams(
        logit_bias=((100, 100.0), (-1, 100.0)), bad_token_ids=(100, 105), repetition_penalty=2.0
    )
    strange = attached(params, slot=0, prompt=(100, -1, 4096), stop=(100,), min_tokens=3)
    out = sample_rows(logits, [strange, attached(slot=1)])
    assert out.token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 5, 12])
def test_a_bad_row_fails_alone(bad_value: float, place: int) -> None:
    """B050: a row of NaN, of +inf, or with nothing to choose from, gives no id, and its mates are
    byte for byte what they are without it. Every id returned is within the vocabulary."""
    logits = logits_like(len(KINDS), 3000, seed=10)
    rows = [attached(params, slot=slot) for slot, params in enumerate(KINDS)]
    before = sample_rows(logits, rows)
    assert not before.failed
    spoilt = logits.clone()
    if bad_value == -float("inf"):
        spoilt[place] = bad_value
    else:
        spoilt[place, 1234] = bad_value
    after = sample_rows(spoilt, rows)
    assert list(after.failed) == [place] and after.failed[place]
    assert place not in after.logprobs
    assert all(0 <= token_id < 3000 for token_id in after.token_ids)
    for index in set(range(len(KINDS))) - {place}:
        assert after.token_ids[index] == before.token_ids[index]
        assert after.logprobs.get(index) == before.logprobs.get(index)


def test_a_row_without_any_id_left_fails_alone() -> None:
    """Masks that leave nothing, for every way to draw."""
    ways = [
        GREEDY,
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.5),
    ]
    rows = [
        attached(replace(way, allowed_token_ids=(3,), bad_token_ids=(3,)), slot=slot)
        for slot, way in enumerate(ways)
    ]
    rows.append(attached(slot=4))
    out = sample_rows(logits_like(5, 500, seed=11), rows)
    assert sorted(out.failed) == [0, 1, 2, 3]
    assert "no finite logit" in out.failed[0]


def test_a_masked_nan_is_still_an_error() -> None:
    logits = logits_like(1, 50, seed=12)
    logits[0, 7] = float("nan")
    out = sample_rows(logits, [attached(SamplingParams(bad_token_ids=(7,)))])
    assert "NaN" in out.failed[0]


def test_a_slot_forgets_what_it_held() -> None:
    """After every kind of row, in every order of kinds, a plain greedy row is plain."""
    logits = logits_like(1, 300, seed=13)
    plain = sample_rows(logits, [attached()])
    sampler = Sampler(300, 1, CPU)
    for params in KINDS:
        sampler.attach(attached(params, stop=(int(logits.argmax()),), min_tokens=5))
        sampler.sample(logits, [Sample(0, 0, 3)])
        sampler.attach(attached())
        assert sampler.sample(logits, [Sample(0, 0, 3)]) == plain


def test_logits_are_left_unchanged_and_shapes_are_checked() -> None:
    logits = logits_like(len(KINDS), 400, seed=14)
    copy = logits.clone()
    sample_rows(logits, [attached(params, slot=slot) for slot, params in enumerate(KINDS)])
    assert torch.equal(logits, copy)
    sampler = Sampler(400, 2, CPU)
    assert sampler.sample(torch.empty(0, 400), []) == SampleOutput([])
    with pytest.raises(ValueError, match="float32"):
        sampler.sample(logits[:1, :399], [Sample(0, 0, 3)])
    with pytest.raises(ValueError, match="float32"):
        sampler.sample(logits[:1].double(), [Sample(0, 0, 3)])


@pytest.mark.parametrize("vocab_size", [50257, 4099])
def test_rows_are_the_same_alone_and_in_any_batch(vocab_size: int) -> None:
    """Id and log probabilities, bit for bit: each alone on one thread, and among 16 mates in two
    random orders on two."""
    logits = logits_like(17, vocab_size, seed=15)
    rows = [
        attached(KINDS[i % len(KINDS)], slot=i, choice=i % 3, outputs=(4, 4, 8)) for i in range(17)
    ]
    with threads(1):
        alone = [sample_rows(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    for seed in (98, 99):
        order = torch.randperm(17, generator=torch.Generator().manual_seed(seed)).tolist()
        with threads(2):
            out = sample_rows(logits[order], [rows[i] for i in order])
        for index, i in enumerate(order):
            assert out.token_ids[index] == alone[i].token_ids[0]
            assert out.logprobs.get(index) == alone[i].logprobs.get(0)
