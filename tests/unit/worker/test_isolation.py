"""A step that raised, taken apart: each row gets what it would have got, or its own failure."""

from __future__ import annotations

import dataclasses

import pytest
from legato_worker.core.batch import AttachedRow, Sample, ScheduledBatch, TableUpdate
from legato_worker.core.request import GREEDY
from legato_worker.isolation import run_row_by_row
from legato_worker.runners.base import FatalRunnerError
from legato_worker.runners.simulated import Fault, FaultKind, SimulatedConfig, SimulatedRunner

BAD = 77


def runner(*faults: Fault) -> SimulatedRunner:
    return SimulatedRunner(
        SimulatedConfig(vocab_size=1000, num_blocks=16, max_num_seqs=4, faults=faults),
        lambda _: None,
    )


def batch(*prompts: tuple[int, ...]) -> ScheduledBatch:
    """Each prompt a row of its own, two samples for the second one (n = 2, same slot's fork)."""
    made = ScheduledBatch(1)
    sampling = dataclasses.replace(GREEDY, logprobs=1, prompt_logprobs=0)
    for slot, ids in enumerate(prompts):
        made.attached.append(AttachedRow(slot, 0, ids, len(ids), sampling, frozenset(), 0))
        made.table_updates.append(TableUpdate(slot, 0, (slot,)))
        made.slots.append(slot)
        made.starts.append(0)
        made.counts.append(len(ids))
        made.token_ids += ids
        made.samples.append(Sample(slot, slot, len(ids)))
        made.prompt_logprob_rows.append(slot)
    fork = len(prompts)
    made.attached.append(
        AttachedRow(fork, 1, prompts[1], len(prompts[1]), sampling, frozenset(), 0)
    )
    made.table_updates.append(TableUpdate(fork, 0, (1,)))
    made.samples.append(Sample(1, fork, len(prompts[1])))
    return made


def test_without_a_fault_it_gives_what_the_whole_step_gives() -> None:
    step = batch((1, 2), (3, 4, 5), (6,))
    whole = runner()
    whole.launch(step)
    assert run_row_by_row(runner(), step) == whole.wait()


def test_the_failing_row_is_told_and_its_mates_are_what_they_would_have_been() -> None:
    good = runner()
    good.launch(batch((1, 2), (3, 4, 5), (6,)))
    expected = good.wait()
    got = run_row_by_row(
        runner(Fault(FaultKind.RAISE, token_id=BAD)), batch((1, 2), (3, BAD, 5), (6,))
    )
    assert list(got.failed_rows) == [1] and "scripted fault" in got.failed_rows[1]
    assert got.token_ids[0] == expected.token_ids[0]
    assert got.token_ids[2] == expected.token_ids[2]
    assert got.token_ids[1] == got.token_ids[3] == -1
    assert set(got.logprobs) == {0, 2} and set(got.prompt_logprobs) == {0, 2}


def test_a_rows_own_failure_stays_its_own() -> None:
    faults = (Fault(FaultKind.RAISE, token_id=BAD), Fault(FaultKind.NO_LOGITS, token_id=3))
    got = run_row_by_row(runner(*faults), batch((1, BAD), (3, 4), (6,)))
    assert list(got.failed_rows) == [0]
    assert got.failed == {1: "the logits are not finite", 3: "the logits are not finite"}


def test_copies_are_made_once() -> None:
    """A copy made again would undo what a row has written since."""
    simulated = runner()
    first = batch((1, 2), (3, 4, 5), (6,))
    simulated.launch(first)
    simulated.wait()
    step = ScheduledBatch(
        2,
        copies=[(1, 5)],
        table_updates=[TableUpdate(3, 0, (5,))],
        slots=[1, 3],
        starts=[3, 3],
        counts=[1, 1],
        token_ids=[8, 9],
        samples=[Sample(0, 1, 4), Sample(1, 3, 4)],
    )
    whole = runner()
    whole.launch(first)
    whole.wait()
    whole.launch(step)
    assert run_row_by_row(simulated, step).token_ids == whole.wait().token_ids
    assert simulated._kv == whole._kv


def test_a_dead_device_is_not_a_rows_failure() -> None:
    with pytest.raises(FatalRunnerError):
        run_row_by_row(runner(Fault(FaultKind.FATAL, token_id=BAD)), batch((1, 2), (BAD, 4), (6,)))
