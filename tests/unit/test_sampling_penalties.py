"""Penalties, and the counts behind them."""

from __future__ import annotations

import pytest
import torch
from legato_worker.core.batch import Sample
from legato_worker.core.request import GREEDY, SamplingParams
from legato_worker.sampling.penalties import PenaltyCounts
from legato_worker.sampling.sampler import Sampler
from torch import Tensor

from tests.unit.sampling_cases import CPU, attached, logits_like, sample_rows


def _penalised(logits: Tensor, prompt: list[int], outputs: list[int], *strengths: float) -> Tensor:
    counts = PenaltyCounts(logits.shape[-1], CPU)
    counts.attach(0, prompt + outputs, len(prompt))
    result = logits.clone().unsqueeze(0)
    counts.apply(result, torch.tensor([0]), [0], torch.tensor([strengths]))
    return result[0]


def test_what_each_penalty_does() -> None:
    """Repetition: prompt and output, whatever the count. Presence: output, once. Frequency: output,
    per occurrence."""
    logits = torch.tensor([4.0, -4.0, 4.0, -4.0, 4.0, 0.0])
    prompt, outputs = [0, 0, 1], [2, 2, 2, 3, 0]
    repetition = _penalised(logits, prompt, outputs, 2.0, 0.0, 0.0)
    assert repetition.tolist() == [2.0, -8.0, 2.0, -8.0, 4.0, 0.0]
    presence = _penalised(logits, prompt, outputs, 1.0, 0.5, 0.0)
    assert presence.tolist() == [3.5, -4.0, 3.5, -4.5, 4.0, 0.0]
    frequency = _penalised(logits, prompt, outputs, 1.0, 0.0, 0.5)
    assert frequency.tolist() == [3.5, -4.0, 2.5, -4.5, 4.0, 0.0]
    together = _penalised(logits, prompt, outputs, 2.0, 1.0, -0.5)
    assert together.tolist() == [1.5, -8.0, 2.5, -8.5, 4.0, 0.0]


def test_masked_ids_stay_masked() -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf])
    assert _penalised(logits, [0], [2], 0.5, -2.0, -2.0).tolist() == [-torch.inf, 1.0, -torch.inf]


def test_own_ids_count() -> None:
    """A strong frequency penalty walks down the ids in the order of their logits, one by one, since
    each chosen id is recorded."""
    logits = logits_like(1, 100, seed=20)
    sampler = Sampler(100, 1, CPU)
    sampler.attach(attached(SamplingParams(frequency_penalty=100.0)))
    ids = [sampler.sample(logits, [Sample(0, 0, 3 + i)]).token_ids[0] for i in range(10)]
    assert ids == logits[0].argsort(descending=True)[:10].tolist()


PENALISED = [
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(repetition_penalty=1.2, temperature=0.9, top_p=0.95, seed=4, logprobs=2),
]


@pytest.mark.parametrize("params", PENALISED)
def test_cold_resumed_and_preempted_runs_are_equal(params: SamplingParams) -> None:
    """B047: an uninterrupted run, and runs that lose their slot after every single step (another
    sequence uses it, then the sequence returns, to another slot too): the same ids."""
    logits = logits_like(30, 120, seed=21)
    cold = Sampler(120, 3, CPU)
    cold.attach(attached(params))
    ids = [cold.sample(logits[i : i + 1], [Sample(0, 0, 3 + i)]).token_ids[0] for i in range(30)]

    plain = sample_rows(logits[-1:], [attached(slot=0)]).token_ids[0]
    assert len(set(ids)) < 30 or plain not in ids  # ids repeat, so that the penalties have work

    moved = Sampler(120, 3, CPU)
    for i in range(30):
        slot = i % 3
        moved.attach(attached(params, slot=slot, outputs=ids[:i]))
        assert moved.sample(logits[i : i + 1], [Sample(0, slot, 3 + i)]).token_ids == [ids[i]]
        moved.attach(attached(PENALISED[1], slot=slot, prompt=tuple(range(50))))
        moved.sample(logits[:1], [Sample(0, slot, 50)])


@pytest.mark.parametrize("params", PENALISED)
def test_a_repeated_step_gives_the_same_and_counts_once(params: SamplingParams) -> None:
    """The engine may run a batch again, or go back several steps: position decides, not the number
    of calls."""
    logits = logits_like(12, 60, seed=22)

    def step(sampler: Sampler, i: int) -> int:
        return sampler.sample(logits[i : i + 1], [Sample(0, 0, 3 + i)]).token_ids[0]

    once, often = Sampler(60, 1, CPU), Sampler(60, 1, CPU)
    once.attach(attached(params))
    often.attach(attached(params))
    expected = [step(once, i) for i in range(12)]
    for i in range(12):
        assert [step(often, i) for _ in range(3)] == [expected[i]] * 3
    for i in (4, 5, 6, 0, 1, 2, 3, 4):
        assert step(often, i) == expected[i]


def test_a_gap_in_the_history_fails_the_row_alone() -> None:
    """After a failed step the next position has no known past: that row says so."""
    logits = logits_like(2, 40, seed=23)
    sampler = Sampler(40, 2, CPU)
    sampler.attach(attached(SamplingParams(repetition_penalty=1.1), slot=0))
    sampler.attach(attached(slot=1))
    broken = logits.clone()
    broken[0] = float("nan")
    assert list(sampler.sample(broken, [Sample(0, 0, 3), Sample(1, 1, 3)]).failed) == [0]
    after = sampler.sample(logits, [Sample(0, 0, 4), Sample(1, 1, 4)])
    assert list(after.failed) == [0] and "never sampled" in after.failed[0]
    assert after.token_ids[1] == int(logits[1].argmax())
    again = sampler.sample(logits, [Sample(0, 0, 3), Sample(1, 1, 3)])
    assert not again.failed


def test_dense_rows_only_for_slots_with_penalties() -> None:
    """Plain slots take no row; a freed row serves the next; 40 slots that come and go need as many
    rows as are in use at once, rounded up to a power of two."""
    sampler = Sampler(1000, 40, CPU)

    def num_rows() -> int:
        return len(sampler._counts._marks)

    for slot in range(40):
        sampler.attach(attached(slot=slot))
    assert num_rows() == 0
    for slot in range(40):
        sampler.attach(attached(PENALISED[0], slot=slot))
        sampler.attach(attached(GREEDY, slot=slot))
    assert num_rows() == 1
    for slot in range(5):
        sampler.attach(attached(PENALISED[0], slot=slot))
    assert num_rows() == 8
