"""Rows that fail alone, and ids that must never enter a sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from legato_worker.core.batch import StepResult
from legato_worker.core.output import EndCause
from legato_worker.runners.simulated import Fault, FaultKind

from tests.unit.core.driver import VOCAB_SIZE, Driver, prompt_of

MARK = 999
"""A prompt id that the scripted fault aims at."""


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", [FaultKind.BAD_ID, FaultKind.NO_LOGITS])
def test_a_failed_row_ends_alone(kind: FaultKind, depth: int) -> None:
    """B050: an id outside the vocabulary, or no usable logits; the mates stay as they are alone."""
    driver = Driver(depth=depth, runner={"faults": (Fault(kind, MARK),)})
    before = driver.add(prompt_of(20), max_tokens=10)
    bad = driver.add([*prompt_of(20, 1), MARK], max_tokens=10, n=2)
    after = driver.add(prompt_of(20, 2), max_tokens=10)
    driver.run()
    driver.assert_idle()
    assert driver.ended[bad].cause is EndCause.INTERNAL and driver.ended[bad].message
    assert not driver.answers[bad, 0] and not driver.answers[bad, 1]
    driver.assert_solo(before)
    driver.assert_solo(after)


@pytest.mark.parametrize("placeholder", [-1, VOCAB_SIZE, 1 << 40])
def test_a_placeholder_id_is_never_stored(placeholder: int) -> None:
    """B050: -1 or V in place of an id, in the middle of an answer."""
    driver = Driver()
    keys = [driver.add(prompt_of(20, seed), max_tokens=10) for seed in range(3)]
    driver.step()
    driver.step()
    driver.launch()

    def spoil(result: StepResult) -> None:
        result.token_ids[1] = placeholder

    driver.commit(spoil)
    driver.run()
    driver.assert_idle()
    assert driver.ended[keys[1]].cause is EndCause.INTERNAL
    assert str(placeholder) in driver.ended[keys[1]].message
    assert len(driver.answers[keys[1], 0]) == 2
    driver.assert_solo(keys[0])
    driver.assert_solo(keys[2])


def fail_row(result: StepResult) -> None:
    result.failed_rows[1] = "the row raised"


def fail_sample(result: StepResult) -> None:
    result.failed[1] = "the logits are not finite"


@pytest.mark.parametrize("failure", [fail_row, fail_sample])
def test_what_a_failed_row_has_written_is_never_reused(
    failure: Callable[[StepResult], None],
) -> None:
    """Its prompt is asked again: the blocks of the failed step are no hit."""
    driver = Driver(budget=128)
    mate = driver.add(prompt_of(20), max_tokens=4)
    failing = driver.add(prompt_of(40, 1), max_tokens=4)
    driver.launch()
    driver.commit(failure)
    driver.collect()
    assert driver.ended[failing].cause is EndCause.INTERNAL
    again = driver.add(prompt_of(40, 1), max_tokens=4)
    driver.run()
    driver.assert_idle()
    assert driver.ended[again].cached_tokens == 0
    driver.assert_solo(mate)
    driver.assert_solo(again)


def test_a_chunk_that_fails_without_a_sample_ends_its_request() -> None:
    driver = Driver(chunk=16)
    driver.add(prompt_of(8), max_tokens=4)
    failing = driver.add(prompt_of(60, 1), max_tokens=4)
    driver.launch()
    assert driver.steps[0][1].samples == 0
    driver.commit(fail_row)
    driver.run()
    driver.assert_idle()
    assert driver.ended[failing].message == "the row raised"


def test_a_row_that_fails_after_its_sequence_lost_its_kv() -> None:
    """Depth 1: preempted while its step ran, and then the step tells that the row failed."""
    driver = Driver(num_blocks=5, max_num_seqs=3, budget=128, depth=1)
    mates = [driver.add(prompt_of(16, seed), max_tokens=30) for seed in range(2)]
    victim = driver.add(prompt_of(17, 2), max_tokens=30)
    driver.launch()
    driver.launch()
    assert driver.sequence(victim).preemptions == 1

    def fail_victim(result: StepResult) -> None:
        result.failed_rows[2] = "the row raised"

    driver.commit(fail_victim)
    driver.collect()
    assert driver.ended[victim].cause is EndCause.INTERNAL
    driver.run()
    driver.assert_idle()
    for key in mates:
        driver.assert_solo(key)


def test_a_row_that_fails_after_its_request_was_cancelled() -> None:
    driver = Driver(depth=1)
    mate = driver.add(prompt_of(8), max_tokens=6)
    key = driver.add(prompt_of(8, 1), max_tokens=6)
    driver.launch()
    driver.cancel(key)
    driver.commit(fail_row)
    driver.run()
    driver.assert_idle()
    assert driver.ended[key].cause is None
    driver.assert_solo(mate)
