"""The token budget of a step, chunks of prompts, and the two batching policies."""

from __future__ import annotations

import pytest
from legato_worker.core.policies import Continuous, Reserve, Static

from tests.unit.core.driver import Driver, prompt_of


def test_a_long_prompt_delays_no_running_stream() -> None:
    """B023: four streams decode while an 8K prompt comes in; each gives an id in every step, and no
    step computes more than the budget."""
    driver = Driver(num_blocks=600, budget=68, chunk=64, runner={"verify": False})
    streams = [driver.add(prompt_of(8, seed), max_tokens=160) for seed in range(4)]
    driver.step()
    long = driver.add(prompt_of(8000, 9), max_tokens=4)
    driver.run()
    for key in streams:
        steps = driver.token_steps[key, 0]
        assert steps == list(range(steps[0], steps[0] + 160))
    chunks = [row.count for _, row in driver.rows_of(long)]
    assert sum(chunks) == 8000 + 3 and max(chunks) == 64
    assert max(sum(row.count for row in rows) for rows in driver.steps) <= 68


def test_decoding_rows_come_first_and_prompts_share_what_is_left() -> None:
    driver = Driver(budget=10, chunk=8)
    decoding = [driver.add(prompt_of(2, seed), max_tokens=20) for seed in range(2)]
    driver.step()
    first, second = (driver.add(prompt_of(20, seed), max_tokens=2) for seed in (5, 6))
    driver.step()
    rows = [(row.key, row.count) for row in driver.steps[-1]]
    assert rows == [(decoding[0], 1), (decoding[1], 1), (first, 8)]
    driver.step()
    driver.step()
    rows = [(row.key, row.start, row.count) for row in driver.steps[-1]]
    # The first prompt's last 4 tokens leave 4 to the second.
    assert rows[2:] == [(first, 16, 4), (second, 0, 4)]


def test_a_prompt_without_budget_has_no_row() -> None:
    driver = Driver(budget=8, chunk=8)
    first, second = (driver.add(prompt_of(12, seed), max_tokens=4) for seed in range(2))
    driver.step()
    driver.step()
    driver.cancel(first)
    third = driver.add(prompt_of(12, 2), max_tokens=4, arrival_s=-1.0)
    for _ in range(4):
        driver.step()
    rows = [[(row.key, row.count) for row in rows] for rows in driver.steps]
    assert rows[:2] == [[(first, 8)], [(first, 4), (second, 4)]]
    assert rows[2:4] == [[(second, 8)], [(second, 1), (third, 7)]]


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 64])
def test_chunks_do_not_change_the_answer(chunk: int) -> None:
    for length in (1, 7, 33, 64):
        driver = Driver(budget=64, chunk=chunk)
        key = driver.add(prompt_of(length), max_tokens=6)
        driver.run()
        driver.assert_idle()
        driver.assert_solo(key)
        starts = [row.start for _, row in driver.rows_of(key)]
        assert starts == [*range(0, length, chunk), *range(length, length + 5)]


def test_every_running_prompt_gets_a_token_when_the_budget_is_smallest() -> None:
    """``max_num_batched_tokens`` may be as low as ``max_num_seqs``."""
    driver = Driver(max_num_seqs=4, budget=4, chunk=64)
    keys = [driver.add(prompt_of(9, seed), max_tokens=5) for seed in range(6)]
    driver.run(max_steps=40)
    for key in keys:
        driver.assert_solo(key)


def three_requests(batching: Static | Continuous) -> dict[str, list[int]]:
    """Two slots; A needs 2 steps, B 4, C 2. The steps in which each gave its ids."""
    driver = Driver(max_num_seqs=2, batching=batching)
    names = {
        driver.add(prompt_of(4, seed), max_tokens=steps): name
        for seed, (name, steps) in enumerate((("A", 2), ("B", 4), ("C", 2)))
    }
    driver.run()
    driver.assert_idle()
    for key in names:
        driver.assert_solo(key)
    return {name: driver.token_steps[key, 0] for key, name in names.items()}


def test_three_requests_in_a_fixed_batch() -> None:
    """C starts after step 4, when the whole group has ended, although A's slot is idle from 3."""
    assert three_requests(Static()) == {"A": [1, 2], "B": [1, 2, 3, 4], "C": [5, 6]}


def test_three_requests_with_continuous_batching() -> None:
    """C takes A's slot after step 2; all is done in 4 steps instead of 6."""
    assert three_requests(Continuous()) == {"A": [1, 2], "B": [1, 2, 3, 4], "C": [3, 4]}


def test_a_fixed_group_is_filled_from_all_that_wait() -> None:
    driver = Driver(max_num_seqs=3, batching=Static())
    keys = [driver.add(prompt_of(4, seed), max_tokens=3) for seed in range(4)]
    driver.step()
    assert driver.keys_running() == keys[:3]
    late = driver.add(prompt_of(4, 9), max_tokens=3)
    driver.step()
    driver.step()
    driver.step()
    assert driver.keys_running() == [keys[3], late]


def test_nothing_to_run_gives_no_batch() -> None:
    driver = Driver()
    assert not driver.step()
    assert driver.scheduler.schedule(1.0) is None and driver.scheduler.step == 0


def test_an_odd_step_of_a_full_pool_needs_no_spare_block() -> None:
    """B035: three rows in a pool whose every block is taken; nothing is padded."""
    driver = Driver(num_blocks=6, max_num_seqs=4, budget=128, capacity=Reserve())
    keys = [driver.add(prompt_of(length, length), max_tokens=5) for length in (26, 27, 28)]
    for _ in range(5):
        driver.step()
        assert len(driver.steps[-1]) == 3
        assert driver.pool.num_available == 0 or not driver.scheduler.has_work
    driver.assert_idle()
    for key in keys:
        driver.assert_solo(key)
