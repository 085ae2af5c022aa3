"""n > 1: one prompt, shared blocks, copies on the first write, and ends of their own."""

from __future__ import annotations

import pytest
from legato.capacity import blocks_needed
from legato_worker.core.request import GREEDY, FinishReason

from tests.unit.core.driver import Driver, prompt_of

EOS = frozenset({0})


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_each_choice_has_its_own_answer(length: int, depth: int) -> None:
    driver = Driver(depth=depth, chunk=16)
    key = driver.add(prompt_of(length), max_tokens=24, n=4)
    driver.run()
    driver.assert_idle()
    driver.assert_solo(key)
    answers = {tuple(driver.answers[key, choice]) for choice in range(4)}
    assert len(answers) == 4 and all(len(answer) == 24 for answer in answers)


def test_greedy_choices_are_equal() -> None:
    driver = Driver()
    key = driver.add(prompt_of(20), n=3, sampling=GREEDY)
    driver.run()
    assert driver.answers[key, 0] == driver.answers[key, 1] == driver.answers[key, 2]


def test_a_single_choice_equals_the_first_of_many() -> None:
    driver = Driver()
    one = driver.add(prompt_of(20), n=1)
    many = driver.add(prompt_of(20), n=4)
    driver.run()
    assert driver.answers[one, 0] == driver.answers[many, 0]


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    """Four choices of a prompt of 40 tokens: 2 full blocks shared, the third copied on write."""
    driver = Driver(prefix_cache=False)
    key = driver.add(prompt_of(40), max_tokens=6, n=4)
    driver.step()
    (row,) = driver.steps[0]
    assert (row.count, row.samples) == (40, 4)
    assert driver.pool.num_used == 3
    assert driver.scheduler.fits(40, 6, 4) and blocks_needed(40, 6, 4, 16) == 2 + 4
    driver.step()
    driver.step()
    tables = [driver.sequence(key, choice).block_ids for choice in range(4)]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert driver.pool.num_used == 2 + 4
    driver.run()
    driver.assert_solo(key)


def test_a_prompt_that_ends_with_a_block_needs_no_copy() -> None:
    driver = Driver()
    key = driver.add(prompt_of(32), max_tokens=4, n=3)
    driver.step()
    batch = driver.scheduler.schedule(driver.now)
    assert batch is not None and batch.copies == [] and len(batch.slots) == 3
    assert len(driver.scheduler.table.requests[key].sequences) == 3


def test_all_choices_start_together_or_wait() -> None:
    """Slots are kept for the choices that will share a prompt still being computed."""
    driver = Driver(max_num_seqs=4, chunk=8, budget=32)
    many = driver.add(prompt_of(20), max_tokens=4, n=3)
    one = driver.add(prompt_of(20, 1), max_tokens=4)
    late = driver.add(prompt_of(20, 2), max_tokens=4)
    driver.step()
    assert driver.keys_running() == [many, one]
    driver.step()
    driver.step()
    assert driver.keys_running() == [many, many, many, one]
    assert not driver.rows_of(late)
    driver.run()
    for key in (many, one, late):
        driver.assert_solo(key)


def test_choices_end_at_different_times_and_a_cancel_ends_the_rest() -> None:
    """B038: n=4 streaming; two have ended, then cancel: all stop in one step, nothing is left, one
    terminal event."""
    driver = Driver(num_blocks=64, depth=1, runner={"eos_probability": 0.08})
    key = driver.add(prompt_of(20, 3), max_tokens=200, n=4, stop_token_ids=EOS)
    while len(driver.ended_choices) < 2:
        driver.step()
    assert key not in driver.ended
    left = set(driver.scheduler.table.requests[key].sequences)
    assert 0 < len(left) <= 2
    lengths = {choice: len(driver.answers[key, choice]) for choice in left}
    driver.cancel(key)
    driver.run(max_steps=2)
    driver.assert_idle()
    assert driver.ended[key].reason is FinishReason.CANCELLED
    assert lengths == {choice: len(driver.answers[key, choice]) for choice in left}


def test_one_choice_can_be_cancelled_alone() -> None:
    """As when its stop string has matched: its mates go on, its slot and blocks return."""
    for depth in (0, 1):
        driver = Driver(depth=depth)
        key = driver.add(prompt_of(20), max_tokens=12, n=3)
        for _ in range(4):
            driver.step()
        used = driver.pool.num_used
        driver.cancel(key, 1)
        driver.step()
        driver.step()
        assert driver.pool.num_used < used
        driver.run()
        driver.assert_idle()
        assert driver.ended_choices[key, 1] is FinishReason.CANCELLED
        assert driver.ended_choices[key, 0] is driver.ended_choices[key, 2] is FinishReason.LENGTH
        assert driver.ended[key].reason is FinishReason.LENGTH and driver.ended[key].cause is None
        assert len(driver.answers[key, 0]) == len(driver.answers[key, 2]) == 12
        assert len(driver.answers[key, 1]) < 12


def test_cancelling_the_last_choice_ends_the_request() -> None:
    driver = Driver()
    key = driver.add(prompt_of(20), max_tokens=50, n=2)
    driver.step()
    driver.step()
    driver.cancel(key, 0)
    driver.cancel(key, 1)
    driver.run(max_steps=1)
    driver.assert_idle()
    assert driver.ended[key].reason is FinishReason.CANCELLED


def test_preempted_choices_come_back_one_by_one() -> None:
    """Choices that lost their KV are recomputed as sequences of their own, with equal answers."""
    for prefix_cache in (True, False):
        driver = Driver(num_blocks=9, prefix_cache=prefix_cache)
        many = driver.add(prompt_of(30), max_tokens=40, n=3)
        one = driver.add(prompt_of(30, 1), max_tokens=40, arrival_s=-1.0)
        driver.run()
        driver.assert_idle()
        assert driver.ended[many].preemptions > 0
        driver.assert_solo(many)
        driver.assert_solo(one)
