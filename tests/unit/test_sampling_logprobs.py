"""Log probabilities of sampled ids and of prompts."""

from __future__ import annotations

import math

import torch
from legato_worker.core.request import SamplingParams
from legato_worker.sampling.logprobs import LOGPROB_FLOOR, prompt_logprobs

from tests.unit.sampling_cases import attached, logits_like, sample_rows


def test_values_equal_the_log_softmax() -> None:
    """Against torch in float64, at two sizes of vocabulary, flat and peaked, within 1e-6."""
    for vocab_size, scale in ((50257, 1.0), (50257, 0.01), (151936, 1.0), (11, 3.0)):
        logits = logits_like(5, vocab_size, seed=30) * scale
        ids = torch.randint(0, vocab_size, (5,), generator=torch.Generator().manual_seed(1))
        exact = logits.double().log_softmax(dim=-1)
        for row, told in enumerate(prompt_logprobs(logits, ids.tolist(), 5)):
            own = exact[row, ids[row]].item()
            assert abs(told.logprob - own) < 1e-6 * max(1, abs(own))
            best = exact[row].topk(5)
            assert told.top_ids == tuple(best.indices.tolist())
            assert torch.allclose(
                torch.tensor(told.top_logprobs, dtype=torch.float64), best.values, atol=1e-6
            )
            assert told.rank == 1 + int((exact[row] > own).sum())


def test_ties_go_by_id_in_list_and_rank() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 5.0, 3.0, 5.0]])
    ranks = [prompt_logprobs(logits, [i], 4)[0].rank for i in range(6)]
    assert ranks == [6, 1, 4, 2, 5, 3]
    assert prompt_logprobs(logits, [0], 4)[0].top_ids == (1, 3, 5, 2)


def test_impossible_ids_are_left_out_and_every_value_is_finite() -> None:
    """B049: -inf in the model's logits, and a top-k of 1 next to logprobs=5: entries of probability
    0 are left out of the list, an own value of probability 0 is the floor, and nothing fails."""
    logits = torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf]])
    told = prompt_logprobs(logits, torch.tensor([3]), 5)[0]
    assert told.logprob == LOGPROB_FLOOR and told.rank == 4
    assert told.top_ids == (0, 1)
    params = SamplingParams(temperature=1.0, top_k=1, logprobs=5)
    out = sample_rows(logits, [attached(params)])
    assert out.token_ids == [0] and not out.failed
    assert out.logprobs[0].top_ids == (0, 1)
    assert all(math.isfinite(value) for value in out.logprobs[0].top_logprobs)


def test_logprobs_are_the_models_own() -> None:
    """Temperature, penalties, bias, bans and cuts change the id, never the numbers."""
    logits = logits_like(1, 500, seed=31)
    best = int(logits.argmax())
    params = SamplingParams(
        temperature=3.0,
        top_k=7,
        repetition_penalty=2.0,
        logit_bias=((9, 3.0),),
        bad_token_ids=(best,),
        logprobs=4,
        seed=1,
    )
    out = sample_rows(logits, [attached(params, prompt=(best, 9))])
    assert out.token_ids[0] != best
    assert out.logprobs[0] == prompt_logprobs(logits, out.token_ids, 4)[0]
    assert out.logprobs[0].top_ids[0] == best


def test_only_who_asks_is_told_and_each_its_own_number() -> None:
    logits = logits_like(4, 300, seed=32)
    asked = [None, 0, 3, 20]
    rows = [attached(SamplingParams(logprobs=k), slot=slot) for slot, k in enumerate(asked)]
    told = sample_rows(logits, rows).logprobs
    assert {index: len(entry.top_ids) for index, entry in told.items()} == {1: 0, 2: 3, 3: 20}
    assert all(entry.rank == 1 for entry in told.values())


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    logits = logits_like(1, 7, seed=33)
    assert len(prompt_logprobs(logits, [0], 20)[0].top_ids) == 7


def test_prompts_longer_than_a_block_and_batches_are_alike() -> None:
    """Bit for bit the same alone and among others, across blocks of rows."""
    logits = logits_like(40, 50257, seed=34)
    ids = list(range(100, 140))
    together = prompt_logprobs(logits, ids, 3)
    assert len(together) == 40
    for row in (0, 9, 10, 11, 39):
        assert prompt_logprobs(logits[row : row + 1], ids[row : row + 1], 3) == [together[row]]
    assert prompt_logprobs(logits[:0], [], 3) == []
