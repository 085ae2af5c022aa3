"""Credit: nothing is computed that may not be delivered, and a slow reader harms itself alone."""

from __future__ import annotations

import pytest
from legato_worker.core.output import EndCause
from legato_worker.core.request import FinishReason, ResumedChoice
from legato_worker.core.request_table import READER_GRACE_S

from tests.unit.core.driver import Driver, prompt_of

EOS = frozenset({0})


def delivered(driver: Driver, key: int) -> int:
    return sum(len(answer) for (owner, _), answer in driver.answers.items() if owner == key)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_never_more_ids_than_credit(n: int, depth: int) -> None:
    """B064: the choices of one request share its credit; together they never overdraw it."""
    driver = Driver(depth=depth)
    key = driver.add(prompt_of(20), max_tokens=10, n=n, credit=n)
    granted = n
    while key not in driver.ended:
        for _ in range(4):
            driver.step()
        assert delivered(driver, key) == min(granted, 10 * n)
        driver.scheduler.grant(key, 2)
        granted += 2
    driver.assert_idle()
    driver.assert_solo(key)


def test_a_request_starts_when_the_first_id_of_each_choice_has_credit() -> None:
    driver = Driver()
    key = driver.add(prompt_of(40), n=2, credit=0)
    driver.step()
    assert driver.steps == [] and driver.scheduler.table.requests[key].starved_since_s == 0.0
    driver.scheduler.grant(key, 1)
    driver.step()
    assert driver.steps == []
    driver.scheduler.grant(key, 1)
    driver.step()
    assert delivered(driver, key) == 2


def test_a_prompt_is_computed_up_to_the_id_that_needs_credit() -> None:
    """Two resumed choices, one credit, which the shorter one takes: the last chunk of the other
    waits for more."""
    driver = Driver(budget=32, chunk=16, prefix_cache=False)
    resume = (ResumedChoice((5,)), ResumedChoice((6,) * 20))
    key = driver.add(prompt_of(40), 30, n=2, credit=1, resume=resume)
    for _ in range(6):
        driver.step()
    ends = [(row.choice, row.start + row.count) for _, row in driver.rows_of(key)]
    assert ends == [(0, 16), (1, 16), (0, 32), (1, 32), (0, 41), (1, 48)]
    driver.scheduler.grant(key, 2)
    driver.step()
    assert [row[1:4] for row in driver.steps[-1]] == [(0, 41, 1), (1, 48, 12)]


def test_a_row_of_this_very_step_keeps_its_kv() -> None:
    """A request runs out of credit in the middle of a step: its first choice has its row already
    and must not lose its blocks to the request that lacks one; the second holds none alone."""
    driver = Driver(num_blocks=5, budget=128)
    paused = driver.add(prompt_of(32), max_tokens=10, n=2, credit=3)
    grows = driver.add(prompt_of(32, 1), max_tokens=10)
    driver.step()
    driver.step()
    assert [row[:2] for row in driver.steps[1]] == [(paused, 0)]
    assert driver.scheduler.table.num_preemptions == 0
    driver.scheduler.grant(paused, 100)
    driver.run()
    driver.assert_idle()
    driver.assert_solo(paused)
    driver.assert_solo(grows)


def test_a_paused_request_goes_on_where_it_was() -> None:
    driver = Driver()
    key = driver.add(prompt_of(20), max_tokens=12, credit=5)
    for _ in range(9):
        driver.step()
    assert delivered(driver, key) == 5 and len(driver.steps) == 5
    driver.scheduler.grant(key, 100)
    driver.run()
    driver.assert_solo(key)
    assert len(driver.steps) == 12


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_credit_of_an_id_that_is_not_delivered_comes_back(end: str) -> None:
    """Depth 1: a choice ends while its next id is in flight. Its mates get that id's credit, so a
    window that is refilled id by id never shrinks."""
    driver = Driver(depth=1, runner={"eos_probability": 0.2 if end == "stop" else 0.0})
    key = driver.add(prompt_of(20, 3), max_tokens=30, n=4, credit=8, stop_token_ids=EOS)
    seen = 0
    cancelled = 0
    for _ in range(2000):
        driver.step()
        if end == "cancel" and cancelled < 3 and len(driver.answers[key, cancelled]) >= 4:
            driver.cancel(key, cancelled)
            cancelled += 1
        if key in driver.ended:
            break
        driver.scheduler.grant(key, delivered(driver, key) - seen)
        seen = delivered(driver, key)
    driver.run(max_steps=2)
    driver.assert_idle()
    assert driver.ended[key].cause is None
    if end == "stop":
        driver.assert_solo(key)
        lengths = {len(driver.answers[key, choice]) for choice in range(4)}
        assert len(lengths) > 1, "choices must end at different times for this test to say anything"


def test_a_returned_credit_wakes_a_starved_mate() -> None:
    """Depth 1, two choices: one is cancelled with an id in flight while the other has no credit."""
    driver = Driver(depth=1, max_num_seqs=2)
    key = driver.add(prompt_of(20), max_tokens=10, n=2, credit=3)
    owner = driver.scheduler.table.requests[key]
    driver.launch()  # both choices' first ids
    driver.launch()  # the third credit goes to choice 0
    driver.commit()
    driver.collect()
    assert owner.credit == 0 and owner.starved_since_s is not None
    driver.cancel(key, 0)
    driver.commit()
    driver.collect()
    assert owner.credit == 1 and owner.starved_since_s is None
    driver.step()
    driver.step()
    assert [len(driver.answers[key, choice]) for choice in range(2)] == [1, 2]


def test_slow_readers_leave_fast_ones_alone() -> None:
    """B064: five slow readers beside five fast ones: the fast ones end as if alone, what waits for
    a slow one is bounded by its credit, and it still gets its whole answer."""
    driver = Driver(num_blocks=64, max_num_seqs=10, budget=256)
    slow = [driver.add(prompt_of(20, seed), max_tokens=40, credit=2) for seed in range(5)]
    fast = [driver.add(prompt_of(20, seed), max_tokens=40) for seed in range(5, 10)]
    for _ in range(40):
        driver.step()
    assert all(key in driver.ended for key in fast)
    assert all(delivered(driver, key) == 2 for key in slow)
    while driver.scheduler.has_work:
        driver.now += 1.0
        for key in slow:
            driver.scheduler.grant(key, 2)
        driver.step()
    driver.assert_idle()
    for key in slow + fast:
        driver.assert_solo(key)


def test_a_reader_that_takes_nothing_is_ended() -> None:
    driver = Driver(slow_reader_s=3.0)
    key = driver.add(prompt_of(20), max_tokens=40, credit=2)
    waiting = driver.add(prompt_of(20, 1), credit=0)
    driver.run()
    driver.assert_idle()
    for each in (key, waiting):
        assert driver.ended[each].cause is EndCause.SLOW_READER
        assert driver.ended[each].reason is FinishReason.CANCELLED
        assert "slow_reader_s = 3 s" in driver.ended[each].message
    assert driver.now == pytest.approx(3.0, abs=0.1)


def test_each_grant_starts_the_wait_anew() -> None:
    driver = Driver(slow_reader_s=3.0)
    key = driver.add(prompt_of(20), max_tokens=6, credit=1)
    for _ in range(5):
        driver.step()
        driver.step()
        driver.now += 2.9
        driver.scheduler.grant(key, 1)
    driver.run()
    driver.assert_solo(key)


def test_a_paused_row_gives_its_kv_to_one_that_needs_it() -> None:
    """Whatever its rank: here the oldest reads slowly and the younger one grows."""
    driver = Driver(num_blocks=4, max_num_seqs=2)
    slow = driver.add(prompt_of(20), max_tokens=30, credit=2)
    fast = driver.add(prompt_of(8, 1), max_tokens=50)
    while fast not in driver.ended:
        driver.step()
    assert driver.scheduler.table.requests[slow].preemptions == 1
    assert driver.sequence(slow).preemptions == 0, "it must earn no protection by reading slowly"
    driver.scheduler.grant(slow, 100)
    driver.run()
    driver.assert_idle()
    driver.assert_solo(slow)
    driver.assert_solo(fast)


@pytest.mark.parametrize("limit", [{"max_num_seqs": 2}, {"num_blocks": 5}])
def test_slow_readers_do_not_stop_the_worker(limit: dict[str, int]) -> None:
    """All slots, or all KV, are held by paused rows and others wait: after a moment's grace the
    paused ones make room. They come back when they read again."""
    driver = Driver(**limit)
    slow = [driver.add(prompt_of(20, seed), max_tokens=6, credit=2) for seed in range(2)]
    for _ in range(5):
        driver.step()
    waits = driver.add(prompt_of(20, 2), max_tokens=6)
    started = driver.now
    while waits not in driver.ended:
        driver.step()
        assert driver.now < started + READER_GRACE_S + 1.0
    assert driver.now >= started + READER_GRACE_S - 0.1
    for key in slow:
        driver.scheduler.grant(key, 10)
    driver.run()
    driver.assert_idle()
    for key in [*slow, waits]:
        driver.assert_solo(key)


def test_paused_rows_keep_their_kv_while_nobody_needs_it() -> None:
    driver = Driver()
    slow = driver.add(prompt_of(20), max_tokens=6, credit=2)
    paused = driver.add(prompt_of(20, 1), credit=0)
    for _ in range(300):
        driver.step()
    assert driver.now > READER_GRACE_S
    assert driver.scheduler.table.num_preemptions == 0 and paused in driver.scheduler.table.requests
    driver.scheduler.grant(slow, 10)
    while slow not in driver.ended:
        driver.step()
    assert driver.ended[slow].recomputed_tokens == 0


def test_a_grant_for_an_ended_request_is_ignored() -> None:
    driver = Driver()
    key = driver.add(prompt_of(8), max_tokens=1)
    driver.run()
    driver.scheduler.grant(key, 5)
    driver.assert_idle()
