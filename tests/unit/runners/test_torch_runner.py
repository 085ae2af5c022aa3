"""The torch runner on small models: whole answers, the rules of its contract, and its failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from legato_worker.core.batch import (
    IN_FLIGHT,
    AttachedRow,
    Sample,
    ScheduledBatch,
    StepResult,
    TableUpdate,
)
from legato_worker.core.request import GREEDY, SamplingParams
from legato_worker.runners.torch_loader import load_torch_runner
from legato_worker.runners.torch_runner import TorchRunner
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from ..models.families import SIZES, make_model, save_model
from .greedy_loop import expected_answer, generate

BLOCK_SIZE = 4
FAMILY = "mistral, sliding window"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(FAMILY, path)
    return path


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    return make_model(FAMILY)


def make_runner(folder: Path, *, num_blocks: int = 64, max_num_seqs: int = 4) -> TorchRunner:
    runner = load_torch_runner(
        folder,
        dtype=torch.float32,
        max_num_seqs=max_num_seqs,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
    )
    runner.poison_free_blocks()
    return runner


@pytest.fixture
def runner(folder: Path) -> TorchRunner:
    return make_runner(folder)


def random_ids(count: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (count,), generator=random).tolist()


def attached(
    slot: int, ids: Sequence[int], sampling: SamplingParams = GREEDY, choice: int = 0
) -> AttachedRow:
    return AttachedRow(slot, choice, tuple(ids), len(ids), sampling, frozenset(), 0)


def run(runner: TorchRunner, batch: ScheduledBatch) -> StepResult:
    runner.launch(batch)
    return runner.wait()


def prompt_batch(prompts: dict[int, list[int]], step: int = 1) -> ScheduledBatch:
    """Whole prompts by slot, each sampled once; slot s holds blocks 10 * s and following."""
    batch = ScheduledBatch(step)
    for row, (slot, ids) in enumerate(prompts.items()):
        batch.attached.append(attached(slot, ids))
        batch.table_updates.append(TableUpdate(slot, 0, tuple(range(10 * slot, 10 * slot + 10))))
        batch.slots.append(slot)
        batch.starts.append(0)
        batch.counts.append(len(ids))
        batch.token_ids += ids
        batch.samples.append(Sample(row, slot, len(ids)))
    return batch


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [7, 200])
def test_answers_are_those_of_one_request_at_a_time(
    folder: Path, theirs: PreTrainedModel, depth: int, budget: int
) -> None:
    """More requests than slots, and blocks that pass from one sequence to the next."""
    prompts = [random_ids(length, length) for length in (1, 30, 17, 8, 4, 23, 60)]
    max_tokens = [12, 3, 20, 1, 9, 16, 5]
    runner = make_runner(folder, num_blocks=45)
    got = generate(runner, prompts, max_tokens, budget=budget, depth=depth)
    for prompt, count, answer in zip(prompts, max_tokens, got, strict=True):
        assert answer == expected_answer(theirs, prompt, count)


def test_an_id_in_flight_is_the_one_sampled_before(runner: TorchRunner) -> None:
    prompts = {0: random_ids(5, 1), 1: random_ids(9, 2)}

    def decode(first: int, second: int) -> ScheduledBatch:
        return ScheduledBatch(
            2,
            slots=[1, 0],
            starts=[9, 5],
            counts=[1, 1],
            token_ids=[second, first],
            samples=[Sample(0, 1, 10), Sample(1, 0, 6)],
        )

    runner.launch(prompt_batch(prompts))
    runner.launch(decode(IN_FLIGHT, IN_FLIGHT))
    sampled = runner.wait().token_ids
    in_flight = runner.wait()
    assert in_flight.step == 2
    assert run(runner, decode(*sampled)).token_ids == in_flight.token_ids


def test_a_step_may_be_executed_again(runner: TorchRunner) -> None:
    batch = prompt_batch({0: random_ids(5, 1), 2: random_ids(9, 2)})
    assert run(runner, batch) == run(runner, batch)


def test_choices_share_a_prompt_and_part_at_a_copied_block(
    runner: TorchRunner, theirs: PreTrainedModel
) -> None:
    """Copy on write: slot 1 takes slot 0's blocks, the last one as a copy, and both go on."""
    prompt = random_ids(6, 3)
    batch = prompt_batch({0: prompt})
    batch.attached.append(attached(1, prompt, choice=1))
    batch.samples.append(Sample(0, 1, 6))
    first = run(runner, batch)
    assert first.token_ids == expected_answer(theirs, prompt, 1) * 2

    fork = ScheduledBatch(
        2,
        table_updates=[TableUpdate(1, 0, (0, 40))],
        copies=[(1, 40)],
        slots=[0, 1],
        starts=[6, 6],
        counts=[1, 1],
        token_ids=[11, 22],
        samples=[Sample(0, 0, 7), Sample(1, 1, 7)],
    )
    ids = run(runner, fork).token_ids
    assert ids == [expected_answer(theirs, [*prompt, other], 1)[0] for other in (11, 22)]
    go_on = ScheduledBatch(
        3,
        slots=[1, 0],
        starts=[7, 7],
        counts=[1, 1],
        token_ids=[IN_FLIGHT, IN_FLIGHT],
        samples=[Sample(0, 1, 8), Sample(1, 0, 8)],
    )
    assert run(runner, go_on).token_ids == [
        expected_answer(theirs, [*prompt, 22], 2)[1],
        expected_answer(theirs, [*prompt, 11], 2)[1],
    ]


def test_a_table_entry_can_be_replaced(runner: TorchRunner, theirs: PreTrainedModel) -> None:
    prompt = random_ids(7, 4)
    run(runner, prompt_batch({0: prompt}))
    moved = ScheduledBatch(
        2,
        table_updates=[TableUpdate(0, 1, (50,))],
        copies=[(1, 50)],
        slots=[0],
        starts=[7],
        counts=[1],
        token_ids=[IN_FLIGHT],
        samples=[Sample(0, 0, 8)],
    )
    assert run(runner, moved).token_ids == expected_answer(theirs, prompt, 2)[1:]


def test_a_chunk_within_a_prompt_samples_nothing(runner: TorchRunner) -> None:
    batch = prompt_batch({0: random_ids(5, 1)})
    batch.samples.clear()
    assert run(runner, batch) == StepResult(1, [])


def test_a_step_without_rows_only_attaches(runner: TorchRunner) -> None:
    assert run(runner, ScheduledBatch(5, attached=[attached(0, [1, 2])])) == StepResult(5, [])


@pytest.mark.parametrize("chunk", [4, 16])
def test_prompt_logprobs_describe_every_next_id(
    runner: TorchRunner, theirs: PreTrainedModel, chunk: int
) -> None:
    prompt, sampling = random_ids(10, 5), SamplingParams(prompt_logprobs=2)
    scores, counts = [], []
    for start in range(0, len(prompt), chunk):
        ids = prompt[start : start + chunk]
        batch = ScheduledBatch(
            1, slots=[3], starts=[start], counts=[len(ids)], token_ids=ids, prompt_logprob_rows=[0]
        )
        if start == 0:
            batch.attached.append(attached(3, prompt, sampling))
            batch.table_updates.append(TableUpdate(3, 0, (9, 8, 7)))
        told = run(runner, batch).prompt_logprobs[0]
        scores += told
        counts.append(len(told))
    assert counts == ([4, 4, 1] if chunk == 4 else [9])
    expected = theirs(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    for position, score in enumerate(scores):
        row = expected[position]
        assert score.logprob == pytest.approx(float(row[prompt[position + 1]]), abs=1e-4)
        assert score.top_ids == tuple(row.topk(2).indices.tolist())


def test_after_preemption_the_answer_is_no_part_of_the_prompt(runner: TorchRunner) -> None:
    ids = random_ids(7, 6)
    row = AttachedRow(0, 0, tuple(ids), 5, SamplingParams(prompt_logprobs=0), frozenset(), 0)
    batch = ScheduledBatch(
        1,
        attached=[row],
        table_updates=[TableUpdate(0, 0, (3, 4))],
        slots=[0],
        starts=[0],
        counts=[7],
        token_ids=ids,
        prompt_logprob_rows=[0],
    )
    assert len(run(runner, batch).prompt_logprobs[0]) == 4


POISON_ID = 7


@pytest.fixture(scope="module")
def sick_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers NaN to every context that holds POISON_ID."""
    path = tmp_path_factory.mktemp("sick")
    model = make_model(FAMILY)
    model.get_input_embeddings().weight[POISON_ID] = torch.nan
    model.save_pretrained(path)
    return path


def test_a_row_of_nan_fails_alone(sick_folder: Path) -> None:
    good, other = [1, 2, 3, 4, 5], [9, 8]
    healthy = run(make_runner(sick_folder), prompt_batch({0: good, 2: other}))
    batch = prompt_batch({0: good, 1: [3, POISON_ID, 4], 2: other, 3: [POISON_ID, 5]})
    del batch.samples[3]  # a chunk within its prompt
    batch.prompt_logprob_rows = [1]
    result = run(make_runner(sick_folder), batch)
    assert [result.token_ids[0], result.token_ids[2]] == healthy.token_ids
    assert result.failed.keys() == {1}
    assert result.failed_rows.keys() == {1, 3}
    assert "not finite" in result.failed_rows[3]
    assert result.prompt_logprobs == {}


def test_nan_out_of_the_last_tokens_sight_fails_the_row_too(tmp_path: Path) -> None:
    """One layer with a window of 9 does not see position 0, whose KV is no less ill."""
    sizes = SIZES | {"num_hidden_layers": 1, "sliding_window": 9}
    model = MistralForCausalLM(MistralConfig(**sizes)).requires_grad_(False)
    model.get_input_embeddings().weight[POISON_ID] = torch.nan
    model.save_pretrained(tmp_path)
    ids = [POISON_ID] + [3] * 199
    batch = ScheduledBatch(
        1,
        attached=[attached(0, ids)],
        table_updates=[TableUpdate(0, 0, tuple(range(50)))],
        slots=[0],
        starts=[0],
        counts=[len(ids)],
        token_ids=ids,
        samples=[Sample(0, 0, len(ids))],
    )
    result = run(make_runner(tmp_path), batch)
    assert result.failed.keys() == result.failed_rows.keys() == {0}


def test_a_sequence_may_go_on_where_a_row_of_nan_was(sick_folder: Path) -> None:
    """Slot and blocks of a failed row, taken over, give the answer of a fresh runner."""
    runner = make_runner(sick_folder)
    run(runner, prompt_batch({0: [3, POISON_ID, 4, 4, 4, 4]}))
    batch = prompt_batch({0: [1, 2, 3]})
    assert run(runner, batch) == run(make_runner(sick_folder), batch)


def test_a_failed_step_leaves_nothing_behind(runner: TorchRunner, folder: Path) -> None:
    good, bad = random_ids(5, 7), [3, SIZES["vocab_size"], 4]
    with pytest.raises(IndexError):
        runner.launch(prompt_batch({0: good, 1: bad}))
    batch = prompt_batch({0: good})
    assert run(runner, batch) == run(make_runner(folder), batch)


def test_in_bf16_it_is_the_same_model(folder: Path, theirs: PreTrainedModel) -> None:
    runner = load_torch_runner(
        folder, dtype=torch.bfloat16, max_num_seqs=1, block_size=BLOCK_SIZE, num_blocks=8
    )
    runner.poison_free_blocks()
    prompt = random_ids(20, 8)
    batch = ScheduledBatch(
        1,
        attached=[attached(0, prompt, SamplingParams(prompt_logprobs=0))],
        table_updates=[TableUpdate(0, 0, (6, 2, 4, 1, 3))],
        slots=[0],
        starts=[0],
        counts=[20],
        token_ids=prompt,
        prompt_logprob_rows=[0],
    )
    scores = run(runner, batch).prompt_logprobs[0]
    expected = theirs(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    got = torch.tensor([score.logprob for score in scores])
    exact = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (got - exact).abs().max() < 0.2
    assert exact.std() > 1
