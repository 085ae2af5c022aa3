"""Rows and logits for the tests of the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from legato_worker.core.batch import AttachedRow, Sample
from legato_worker.core.request import GREEDY, SamplingParams
from legato_worker.sampling.sampler import SampleOutput, Sampler
from torch import Tensor

CPU = torch.device("cpu")

KINDS = (
    GREEDY,
    SamplingParams(logprobs=5),
    SamplingParams(repetition_penalty=1.3, logprobs=0),
    SamplingParams(frequency_penalty=0.7, presence_penalty=-0.4, logprobs=2),
    SamplingParams(logit_bias=((5, 8.0), (9, -100.0)), bad_token_ids=(7,)),
    SamplingParams(temperature=0.8, seed=1, logprobs=3),
    SamplingParams(temperature=1.3, min_p=0.05, seed=2),
    SamplingParams(temperature=1.0, top_k=3, seed=3, logprobs=1),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.8, seed=4),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, logprobs=20),
    SamplingParams(temperature=2.0, top_p=0.999, min_p=0.001, seed=6),
    SamplingParams(temperature=1.0, top_k=10, repetition_penalty=1.2, seed=(1 << 64) - 1),
    SamplingParams(temperature=1.0, allowed_token_ids=(4, 8, 15, 16, 23, 42), seed=8),
)
"""Every feature of the sampler at least once."""


def attached(
    params: SamplingParams = GREEDY,
    *,
    slot: int = 0,
    choice: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    outputs: Sequence[int] = (),
    stop: Iterable[int] = (),
    min_tokens: int = 0,
) -> AttachedRow:
    return AttachedRow(
        slot=slot,
        choice=choice,
        token_ids=(*prompt, *outputs),
        num_prompt=len(prompt),
        sampling=params,
        stop_token_ids=frozenset(stop),
        min_tokens=min_tokens,
    )


def logits_like(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """Noise with some clear favourites, as a model's logits are."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=source) * 2
    favourites = torch.randint(0, vocab_size, (num_rows, 40), generator=source)
    return logits.scatter_add(1, favourites, torch.rand(num_rows, 40, generator=source) * 9)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs torch's CPU operations on ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sample_rows(logits: Tensor, rows: Sequence[AttachedRow]) -> SampleOutput:
    """One step of a new sampler: row i of ``logits`` continues ``rows[i]``."""
    sampler = Sampler(logits.shape[-1], max(row.slot for row in rows) + 1, CPU)
    for row in rows:
        sampler.attach(row)
    return sampler.sample(
        logits, [Sample(i, row.slot, len(row.token_ids)) for i, row in enumerate(rows)]
    )


def draws(logits: Tensor, params: SamplingParams, num_draws: int, choice: int = 0) -> list[int]:
    """Ids at positions 3, 4, ... of one sequence whose logits never change."""
    sampler = Sampler(logits.shape[-1], 1, CPU)
    sampler.attach(attached(params, choice=choice))
    rows = logits.expand(num_draws, -1)
    return sampler.sample(rows, [Sample(i, 0, 3 + i) for i in range(num_draws)]).token_ids
