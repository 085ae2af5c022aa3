"""The vectorised sampler against the plain one, on random rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from legato_worker.core.batch import AttachedRow, Sample
from legato_worker.core.request import SamplingParams
from legato_worker.sampling.sampler import Sampler

from tests.property import sampling_oracle as oracle

VOCAB_SIZE = 320
CPU = torch.device("cpu")

token_ids = st.integers(0, VOCAB_SIZE - 1)


def _often(value: float, others: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    return st.one_of(st.just(value), others)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    bias = draw(st.dictionaries(token_ids, st.floats(-20, 20, width=32), max_size=4))
    return SamplingParams(
        temperature=draw(_often(0.0, st.floats(0.05, 5))),
        top_k=draw(st.one_of(st.just(0), st.integers(1, 400))),
        top_p=draw(_often(1.0, st.floats(0.01, 1))),
        min_p=draw(_often(0.0, st.floats(0, 1))),
        repetition_penalty=draw(_often(1.0, st.floats(0.25, 4))),
        presence_penalty=draw(_often(0.0, st.floats(-2, 2))),
        frequency_penalty=draw(_often(0.0, st.floats(-2, 2))),
        logit_bias=tuple(bias.items()),
        allowed_token_ids=tuple(draw(st.one_of(st.just(()), st.lists(token_ids, min_size=4)))),
        bad_token_ids=tuple(draw(st.lists(token_ids, max_size=3))),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        logprobs=draw(st.one_of(st.none(), st.integers(0, 5))),
    )


@st.composite
def attached_row(draw: st.DrawFn, slot: int) -> AttachedRow:
    ids = draw(st.lists(token_ids, min_size=1, max_size=12))
    return AttachedRow(
        slot=slot,
        choice=draw(st.integers(0, 5)),
        token_ids=tuple(ids),
        num_prompt=draw(st.integers(1, len(ids))),
        sampling=draw(sampling_params()),
        stop_token_ids=frozenset(draw(st.lists(token_ids, max_size=3))),
        min_tokens=draw(st.integers(0, 12)),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_row_is_what_the_contract_says(data: st.DataObject) -> None:
    """Several steps of a batch of random rows: each id is the oracle's, given the ids before it."""
    num_rows = data.draw(st.integers(1, 6))
    rows = [data.draw(attached_row(slot)) for slot in range(num_rows)]
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    coarse = data.draw(st.booleans())  # logits on a grid: many exact ties
    sampler = Sampler(VOCAB_SIZE, num_rows, CPU)
    for row in rows:
        sampler.attach(row)
    for _ in range(3):
        logits = torch.randn(num_rows, VOCAB_SIZE, generator=source) * 4
        if coarse:
            logits = logits.round()
        out = sampler.sample(
            logits, [Sample(i, row.slot, len(row.token_ids)) for i, row in enumerate(rows)]
        )
        for index, row in enumerate(rows):
            plain = logits[index].numpy()
            x = oracle.processed(plain, row, len(row.token_ids))
            if x.max() == -float("inf"):
                assert index in out.failed
                continue
            assert index not in out.failed
            oracle.check(plain, row, out.token_ids[index])
        rows = [
            row._replace(token_ids=(*row.token_ids, out.token_ids[index]))
            for index, row in enumerate(rows)
            if index not in out.failed
        ]
        if len(rows) < num_rows:
            return


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_batch_is_its_rows(data: st.DataObject) -> None:
    """Any batch, in any order, equals its rows run alone, log probabilities included."""
    num_rows = data.draw(st.integers(2, 8))
    rows = [data.draw(attached_row(slot)) for slot in range(num_rows)]
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=source) * 4
    order = data.draw(st.permutations(range(num_rows)))
    together = Sampler(VOCAB_SIZE, num_rows, CPU)
    for row in rows:
        together.attach(row)
    out = together.sample(
        logits[order], [Sample(i, slot, len(rows[slot].token_ids)) for i, slot in enumerate(order)]
    )
    for index, slot in enumerate(order):
        alone = Sampler(VOCAB_SIZE, num_rows, CPU)
        alone.attach(rows[slot])
        one = alone.sample(logits[slot : slot + 1], [Sample(0, slot, len(rows[slot].token_ids))])
        assert one.token_ids[0] == out.token_ids[index]
        assert one.failed.get(0) == out.failed.get(index)
        assert one.logprobs.get(0) == out.logprobs.get(index)
