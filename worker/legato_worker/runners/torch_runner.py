"""Executes batches with torch: one packed forward pass a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import torch
from legato_kernels.dispatch import copy_blocks
from legato_kernels.paged import PagedKV

from ..core.batch import AttachedRow, Sample, ScheduledBatch, StepResult, TableUpdate, TokenLogprobs
from ..core.request import GREEDY
from ..models.base import PackedModel
from ..sampling.logprobs import prompt_logprobs
from ..sampling.sampler import Sampler
from .base import RunnerSpec
from .step_inputs import StepInputs

_LOGITS_ROWS = 256
"""Prompt positions whose logits are held at once: with 150,000 ids, 150 MB of fp32."""


@dataclass(frozen=True, slots=True)
class _ScoredPrompt:
    """A prompt whose log probabilities are wanted, with ``num_top`` alternatives each."""

    token_ids: tuple[int, ...]
    num_top: int


class TorchRunner:
    """A :class:`~legato_worker.runners.base.Runner` that computes in ``launch`` and hands the
    result over in ``wait``; so any in-flight depth gives the same answers.

    Owns the KV pool and all per-slot state. A row whose hidden states are not finite is told in
    ``failed_rows``, and the samples drawn from it in ``failed``; its mates are what they would be
    without it, since rows meet nowhere.
    """

    def __init__(
        self,
        model: PackedModel,
        kv: PagedKV,
        sampler: Sampler,
        *,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._inputs = StepInputs(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=kv.block_size
        )
        self._scored_prompts: dict[int, _ScoredPrompt] = {}
        self._results: deque[StepResult] = deque()
        self._spec = RunnerSpec(
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            block_size=kv.block_size,
            num_blocks=kv.keys[0].shape[0],
            max_num_seqs=max_num_seqs,
            eos_token_ids=eos_token_ids,
        )
        self._warm_up()

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def launch(self, batch: ScheduledBatch) -> None:
        self._results.append(self._execute(batch))

    def wait(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        """Drops results that nobody waited for."""
        self._results.clear()

    def poison_free_blocks(self) -> None:
        """Fault injection: fills the pool with NaN. Only while no sequence holds a block."""
        for cache in (*self._kv.keys, *self._kv.values):
            cache.fill_(torch.nan)

    @torch.inference_mode()
    def _execute(self, batch: ScheduledBatch) -> StepResult:
        for row in batch.attached:
            self._attach(row)
        self._inputs.update_tables(batch.table_updates)
        if batch.copies:
            sources, targets = torch.tensor(batch.copies, dtype=torch.int64).unbind(1)
            copy_blocks(self._kv, sources, targets)
        if not batch.slots:
            return StepResult(batch.step, [])

        token_ids, step = self._inputs.build(batch)
        hidden = self._model.forward(token_ids, step, self._kv)
        query_start = step.query_start.tolist()
        failed_rows = _failed_rows(hidden, query_start)

        last_tokens = torch.tensor([query_start[s.row + 1] - 1 for s in batch.samples])
        result = StepResult(batch.step, [], failed_rows=failed_rows)
        if batch.samples:
            sampled = self._sampler.sample(
                self._model.logits(hidden.index_select(0, last_tokens)), batch.samples
            )
            self._inputs.record_sampled([s.slot for s in batch.samples], sampled.token_ids)
            result.token_ids = sampled.token_ids
            result.logprobs = sampled.logprobs
            result.failed = sampled.failed | {
                index: failed_rows[sample.row]
                for index, sample in enumerate(batch.samples)
                if sample.row in failed_rows
            }
        for packed_row in batch.prompt_logprob_rows:
            if packed_row not in failed_rows:
                result.prompt_logprobs[packed_row] = self._score_prompt(
                    batch, packed_row, hidden[query_start[packed_row] : query_start[packed_row + 1]]
                )
        return result

    def _attach(self, row: AttachedRow) -> None:
        self._sampler.attach(row)
        if row.sampling.prompt_logprobs is None:
            self._scored_prompts.pop(row.slot, None)
        else:
            self._scored_prompts[row.slot] = _ScoredPrompt(
                row.token_ids[: row.num_prompt], row.sampling.prompt_logprobs
            )

    def _score_prompt(
        self, batch: ScheduledBatch, packed_row: int, hidden: torch.Tensor
    ) -> list[TokenLogprobs]:
        prompt = self._scored_prompts[batch.slots[packed_row]]
        start = batch.starts[packed_row]
        next_ids = prompt.token_ids[start + 1 : start + 1 + len(hidden)]
        scores: list[TokenLogprobs] = []
        for first in range(0, len(next_ids), _LOGITS_ROWS):
            ids = next_ids[first : first + _LOGITS_ROWS]
            logits = self._model.logits(hidden[first : first + len(ids)])
            scores += prompt_logprobs(logits, ids, prompt.num_top)
        return scores

    def _warm_up(self) -> None:
        """Runs a prompt and a full decode step, so that no request pays for lazy set-up (threads,
        compiled primitives, allocator). Leaves rubbish in the first block, which nobody reads."""
        num_rows = self._spec.max_num_seqs
        count = min(self._spec.block_size, self._spec.max_model_len)
        prompt = ScheduledBatch(
            step=0,
            attached=[
                AttachedRow(slot, 0, (0,), 1, GREEDY, frozenset(), 0) for slot in range(num_rows)
            ],
            table_updates=[TableUpdate(slot, 0, (0,)) for slot in range(num_rows)],
            slots=[0],
            starts=[0],
            counts=[count],
            token_ids=[0] * count,
            samples=[Sample(0, 0, count)],
        )
        decode = ScheduledBatch(
            step=0,
            slots=list(range(num_rows)),
            starts=[0] * num_rows,
            counts=[1] * num_rows,
            token_ids=[0] * num_rows,
            samples=[Sample(slot, slot, 1) for slot in range(num_rows)],
        )
        for batch in (prompt, decode):
            self._execute(batch)


def _failed_rows(hidden: torch.Tensor, query_start: list[int]) -> dict[int, str]:
    finite = hidden.sum(dim=-1, dtype=torch.float32).isfinite()  # a sum keeps NaN and infinity
    if finite.all():
        return {}
    return {
        row: "the model's hidden states are not finite"
        for row, (first, end) in enumerate(pairwise(query_start))
        if not finite[first:end].all()
    }
