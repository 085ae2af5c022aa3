"""One step in flight while the next is scheduled: same answers, and nothing reused too early."""

from __future__ import annotations

import pytest
from legato_worker.core.batch import IN_FLIGHT
from legato_worker.core.request import FinishReason

from tests.unit.core.driver import Driver, prompt_of

EOS = frozenset({0})


def test_a_decode_row_takes_its_input_from_the_step_before() -> None:
    driver = Driver(depth=1)
    driver.add(prompt_of(5), max_tokens=4)
    first = driver.scheduler.schedule(0.0)
    assert first is not None
    driver.runner.launch(first)
    second = driver.scheduler.schedule(0.0)
    assert second is not None
    assert (second.starts, second.token_ids) == ([5], [IN_FLIGHT])
    assert second.samples[0].position == 6
    driver.runner.launch(second)
    driver.commit()
    third = driver.scheduler.schedule(0.0)
    assert third is not None and third.token_ids == [IN_FLIGHT]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_no_row_follows_the_last_id(max_tokens: int) -> None:
    """The number of ids is known beforehand, so a length limit wastes no row at depth 1."""
    for depth in (0, 1):
        driver = Driver(depth=depth)
        key = driver.add(prompt_of(5), max_tokens=max_tokens)
        driver.run()
        driver.assert_idle()
        assert len(driver.rows_of(key)) == max_tokens
        driver.assert_solo(key)


def test_what_a_row_gives_after_the_stop_is_dropped() -> None:
    """At depth 1 one row runs past the stop id; its id is never delivered."""
    for depth in (0, 1):
        driver = Driver(depth=depth, runner={"eos_probability": 0.1})
        key = driver.add(prompt_of(9, 4), max_tokens=100, stop_token_ids=EOS)
        driver.run()
        driver.assert_idle()
        assert driver.ended[key].reason is FinishReason.STOP
        assert driver.answers[key, 0][-1] == 0 and 0 not in driver.answers[key, 0][:-1]
        assert len(driver.rows_of(key)) == len(driver.answers[key, 0]) + depth
        driver.assert_solo(key)


def test_a_finish_during_an_overlapped_step_frees_each_block_once() -> None:
    """B029: one short prompt, 200 new ids, the end while a step is in flight."""
    driver = Driver(num_blocks=16, depth=1, runner={"eos_probability": 0.004})
    for seed in range(12):
        key = driver.add(prompt_of(3, seed), max_tokens=200, stop_token_ids=EOS)
        while driver.scheduler.has_work:
            driver.step()
            pool = driver.pool
            assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        driver.assert_idle()
        driver.assert_solo(key)
    assert {end.reason for end in driver.ended.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_results_are_taken_in_order() -> None:
    driver = Driver(depth=1)
    driver.add(prompt_of(5), max_tokens=4)
    driver.launch()
    driver.launch()

    def relabel(result: object) -> None:
        object.__setattr__(result, "step", 2)

    with pytest.raises(AssertionError, match="result of step 2, expected 1"):
        driver.commit(relabel)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_both_depths_give_the_same_answers(prefix_cache: bool) -> None:
    """Tiny pool, forced preemption, chunks of 7, cancels, prefix hits: each row equals its solo
    run at both depths."""
    for depth in (0, 1):
        driver = Driver(
            num_blocks=12,
            max_num_seqs=6,
            budget=20,
            chunk=7,
            depth=depth,
            prefix_cache=prefix_cache,
            runner={"eos_probability": 0.02},
        )
        keys = []
        for seed in range(24):
            prompt = prompt_of(18 + seed % 5, seed % 3) + [seed + 1] * (seed % 4)
            keys.append(driver.add(prompt, max_tokens=25, n=1 + seed % 3 % 2, stop_token_ids=EOS))
        for number in range(60):
            driver.step()
            if number % 20 == 19:
                driver.cancel(keys[number // 4])
        driver.run()
        driver.assert_idle()
        assert driver.scheduler.table.num_preemptions > 0
        complete = [key for key in keys if driver.ended[key].reason is not FinishReason.CANCELLED]
        assert len(complete) >= 21
        for key in complete:
            driver.assert_solo(key)
