"""A small continuous-batching loop that plays the scheduler, and the answers to expect of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from legato_worker.core.batch import (
    IN_FLIGHT,
    AttachedRow,
    Sample,
    ScheduledBatch,
    StepResult,
    TableUpdate,
)
from legato_worker.core.request import GREEDY
from legato_worker.runners.base import Runner
from transformers import PreTrainedModel


@dataclass
class _Running:
    request: int
    slot: int
    ids: list[int]
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0

    @property
    def num_known(self) -> int:
        return len(self.ids) + self.num_in_flight


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    *,
    budget: int,
    depth: int,
) -> list[list[int]]:
    """Greedy answers to all prompts. Each step computes up to ``budget`` tokens, oldest rows first;
    a new prompt starts when a slot is free; ``depth`` steps are launched ahead of their results."""
    spec = runner.spec
    free_slots = list(range(spec.max_num_seqs))
    free_blocks = deque(range(spec.num_blocks))
    waiting = deque(range(len(prompts)))
    running: list[_Running] = []
    launched: deque[list[_Running]] = deque()
    answers: list[list[int]] = [[] for _ in prompts]
    step = 0

    def admit(batch: ScheduledBatch) -> None:
        while waiting and free_slots:
            request = waiting.popleft()
            row = _Running(request, free_slots.pop(), list(prompts[request]), len(prompts[request]))
            running.append(row)
            batch.attached.append(
                AttachedRow(row.slot, 0, tuple(row.ids), row.num_prompt, GREEDY, frozenset(), 0)
            )

    def schedule(batch: ScheduledBatch) -> list[_Running]:
        left, sampled = budget, []
        for row in running:
            wanted = row.num_known - row.num_computed
            if row.num_known - row.num_prompt >= max_tokens[row.request]:
                continue  # its last id is in flight
            if not (count := min(left, wanted)):
                continue
            end = row.num_computed + count
            missing = -(-end // spec.block_size) - len(row.blocks)
            if missing > 0:
                blocks = [free_blocks.popleft() for _ in range(missing)]
                batch.table_updates.append(TableUpdate(row.slot, len(row.blocks), tuple(blocks)))
                row.blocks += blocks
            known = row.ids + [IN_FLIGHT] * row.num_in_flight
            batch.token_ids += known[row.num_computed : end]
            batch.slots.append(row.slot)
            batch.starts.append(row.num_computed)
            batch.counts.append(count)
            row.num_computed = end
            left -= count
            if end == row.num_known:
                batch.samples.append(Sample(len(batch.slots) - 1, row.slot, end))
                sampled.append(row)
                row.num_in_flight += 1
        return sampled

    def commit(result: StepResult) -> None:
        assert not result.failed and not result.failed_rows
        for row, token_id in zip(launched.popleft(), result.token_ids, strict=True):
            row.ids.append(token_id)
            row.num_in_flight -= 1
            answers[row.request].append(token_id)
            if len(answers[row.request]) == max_tokens[row.request]:
                running.remove(row)
                free_slots.append(row.slot)
                free_blocks.extend(row.blocks)

    while waiting or running:
        step += 1
        batch = ScheduledBatch(step)
        admit(batch)
        launched.append(schedule(batch))
        runner.launch(batch)
        if len(launched) > depth:
            commit(runner.wait())
    while launched:
        commit(runner.wait())
    return answers


def expected_answer(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """transformers' own greedy answer, one request at a time, end-of-sequence ids ignored."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
