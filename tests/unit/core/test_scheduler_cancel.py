"""Cancel in every state a request can be in, and the ends that time brings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from legato_worker.core.output import EndCause
from legato_worker.core.request import FinishReason
from legato_worker.core.sequence import State

from tests.unit.core.driver import Driver, prompt_of


def waiting() -> tuple[Driver, int]:
    driver = Driver(max_num_seqs=1)
    driver.add(prompt_of(8), max_tokens=40)
    driver.step()
    return driver, driver.add(prompt_of(8, 1))


def in_its_prompt() -> tuple[Driver, int]:
    driver = Driver(chunk=8)
    key = driver.add(prompt_of(60))
    driver.step()
    return driver, key


def decoding() -> tuple[Driver, int]:
    driver = Driver()
    key = driver.add(prompt_of(20), max_tokens=40)
    for _ in range(3):
        driver.step()
    return driver, key


def in_flight() -> tuple[Driver, int]:
    driver = Driver(depth=1)
    key = driver.add(prompt_of(20), max_tokens=40)
    for _ in range(3):
        driver.step()
    assert driver.scheduler.num_in_flight == 1
    return driver, key


def forked_in_flight() -> tuple[Driver, int]:
    driver = Driver(depth=1)
    key = driver.add(prompt_of(20), max_tokens=40, n=3)
    driver.step()
    return driver, key


def preempted() -> tuple[Driver, int]:
    driver = Driver(num_blocks=5, max_num_seqs=3, budget=128)
    for seed in range(2):
        driver.add(prompt_of(16, seed), max_tokens=30)
    key = driver.add(prompt_of(17, 2), max_tokens=30)
    driver.step()
    driver.step()
    assert driver.sequence(key).state is State.WAITING and driver.sequence(key).preemptions
    return driver, key


def preempted_with_an_id_in_flight() -> tuple[Driver, int]:
    driver = Driver(num_blocks=5, max_num_seqs=3, budget=128, depth=1)
    for seed in range(2):
        driver.add(prompt_of(16, seed), max_tokens=30)
    key = driver.add(prompt_of(17, 2), max_tokens=30)
    driver.launch()
    driver.launch()
    assert driver.sequence(key).state is State.WAITING and driver.sequence(key).num_in_flight
    return driver, key


def starved() -> tuple[Driver, int]:
    driver = Driver()
    key = driver.add(prompt_of(20), max_tokens=40, credit=2)
    for _ in range(5):
        driver.step()
    assert driver.scheduler.table.requests[key].starved_since_s is not None
    return driver, key


def never_credited() -> tuple[Driver, int]:
    driver = Driver()
    key = driver.add(prompt_of(20), credit=0)
    driver.step()
    return driver, key


STATES = [
    waiting,
    in_its_prompt,
    decoding,
    in_flight,
    forked_in_flight,
    preempted,
    preempted_with_an_id_in_flight,
    starved,
    never_credited,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_cancel(state: Callable[[], tuple[Driver, int]]) -> None:
    """B098: one terminal event, no id after it, everything returned, mates unharmed."""
    driver, key = state()
    mates = [other for other in driver.requests if other != key]
    driver.cancel(key)
    driver.collect()
    assert driver.ended[key].reason is FinishReason.CANCELLED and driver.ended[key].cause is None
    assert key not in driver.scheduler.table.requests
    driver.scheduler.check()
    # The step in flight at most keeps its blocks; no row follows.
    steps = len(driver.steps)
    driver.run()
    driver.assert_idle()
    assert all(row.key != key for rows in driver.steps[steps:] for row in rows)
    for mate in mates:
        driver.assert_solo(mate)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_the_deadline_passes(state: Callable[[], tuple[Driver, int]]) -> None:
    """The same states, ended by their deadline: an error before the first id, a cut after it."""
    driver, key = state()
    mates = [other for other in driver.requests if other != key]
    owner = driver.scheduler.table.requests[key]
    deadline_s = driver.now + 5.0
    object.__setattr__(owner.request, "deadline_s", deadline_s)
    driver.scheduler.table._watch_expiry(owner)
    while driver.now < deadline_s and key not in driver.ended:
        driver.now += 5.0
        begun = any(len(s.token_ids) > s.num_prompt for s in owner.sequences.values())
        driver.step()
    assert driver.ended[key].reason is FinishReason.DEADLINE
    assert driver.ended[key].cause is (None if begun else EndCause.DEADLINE_EXCEEDED)
    driver.run()
    driver.assert_idle()
    for mate in mates:
        driver.assert_solo(mate)


def test_cancelling_twice_or_after_the_end_is_nothing() -> None:
    driver = Driver()
    key = driver.add(prompt_of(8), max_tokens=2)
    other = driver.add(prompt_of(8, 1), max_tokens=6)
    driver.cancel(12345)
    driver.step()
    driver.cancel(key)
    driver.cancel(key)
    driver.cancel(key, 0)
    driver.run()
    driver.cancel(key)
    driver.collect()
    driver.assert_idle()
    assert list(driver.ended) == [key, other]
    driver.assert_solo(other)


def test_a_choice_that_does_not_exist_is_ignored() -> None:
    driver = Driver()
    key = driver.add(prompt_of(8), max_tokens=4, n=2)
    driver.step()
    driver.cancel(key, 7)
    driver.run()
    driver.assert_solo(key)


def test_cancel_and_admit_on_the_same_blocks_in_one_tick() -> None:
    """B031: A is cancelled while its step runs, B wants A's blocks at once. B waits for the step to
    end, and its answer is that of its solo run."""
    driver = Driver(num_blocks=4, depth=1, prefix_cache=False)
    first = driver.add(prompt_of(50), max_tokens=14)
    driver.launch()
    driver.cancel(first)
    second = driver.add(prompt_of(50, 1), max_tokens=10)
    assert driver.kv.num_fenced == 4 and driver.pool.num_available == 0
    assert not driver.launch()
    driver.commit()
    driver.collect()
    assert driver.kv.num_fenced == 0
    assert driver.launch() and driver.steps[-1][0].key == second
    driver.run()
    driver.assert_idle()
    driver.assert_solo(second)
    assert driver.answers[first, 0] == []


def test_a_slot_is_not_given_away_while_a_step_uses_it() -> None:
    """Depth 1: the last id of A is sampled into its slot by the step that still runs."""
    driver = Driver(max_num_seqs=1, depth=1)
    first = driver.add(prompt_of(8), max_tokens=6)
    second = driver.add(prompt_of(8, 1), max_tokens=6)
    driver.launch()
    driver.launch()
    driver.cancel(first)
    driver.commit()
    assert not driver.launch()  # step 2 still holds the slot
    driver.commit()
    assert driver.launch() and driver.steps[-1][0].key == second
    driver.run()
    driver.assert_idle()
    driver.assert_solo(second)


def test_the_slot_of_a_forked_choice_is_not_given_away_either() -> None:
    driver = Driver(max_num_seqs=2, depth=1)
    many = driver.add(prompt_of(8), max_tokens=6, n=2)
    second = driver.add(prompt_of(8, 1), max_tokens=6)
    driver.launch()
    driver.cancel(many)
    assert not driver.launch()
    driver.commit()
    driver.collect()
    driver.run()
    driver.assert_idle()
    driver.assert_solo(second)


def test_work_whose_caller_gave_up_is_not_run() -> None:
    """B025: a deadline of 50 ms with a second of queue, and a cancel while queued: no step, no
    block."""
    driver = Driver(max_num_seqs=1)
    running = driver.add(prompt_of(8), max_tokens=100)
    driver.step()
    late = driver.add(prompt_of(8, 1), deadline_s=driver.now + 0.05)
    given_up = driver.add(prompt_of(8, 2))
    served = driver.add(prompt_of(8, 3), max_tokens=2)
    driver.step()
    driver.cancel(given_up)
    driver.run()
    driver.assert_idle()
    assert driver.rows_of(late) == driver.rows_of(given_up) == []
    end = driver.ended[late]
    assert end.cause is EndCause.DEADLINE_EXCEEDED and "first token" in end.message
    assert 0.05 <= end.queue_s < 0.07
    driver.assert_solo(running)
    driver.assert_solo(served)


def test_the_deadline_is_checked_when_a_request_leaves_the_queue() -> None:
    """B025: time passed and a slot came free between two steps: the late one does not take it."""
    driver = Driver(max_num_seqs=1)
    first = driver.add(prompt_of(8), max_tokens=1)
    driver.step()
    late = driver.add(prompt_of(8, 1), deadline_s=driver.now + 0.05)
    driver.now += 0.05
    driver.step()
    assert driver.ended[late].cause is EndCause.DEADLINE_EXCEEDED and not driver.rows_of(late)
    driver.assert_solo(first)


def test_a_deadline_while_the_first_id_is_in_flight_is_before_the_first_id() -> None:
    driver = Driver(depth=1)
    key = driver.add(prompt_of(8), deadline_s=1.0)
    driver.step()
    driver.now = 1.0
    driver.run()
    driver.assert_idle()
    assert driver.ended[key].cause is EndCause.DEADLINE_EXCEEDED and not driver.answers[key, 0]


def test_waiting_is_bounded() -> None:
    driver = Driver(max_num_seqs=1, max_queue_s=2.0)
    running = driver.add(prompt_of(8), max_tokens=300)
    waits = driver.add(prompt_of(8, 1))
    driver.run()
    end = driver.ended[waits]
    assert end.cause is EndCause.QUEUE_TIMEOUT and "max_queue_s = 2 s" in end.message
    assert end.queue_s == pytest.approx(2.0, abs=0.02)
    driver.assert_solo(running)


def test_a_started_request_has_no_queue_timeout() -> None:
    """Not even while it waits again after a preemption."""
    driver, key = preempted()
    driver.now += 10_000.0
    driver.run()
    driver.assert_solo(key)


def test_all_can_be_ended_at_once() -> None:
    """Drain deadline or a dead runner: every state at the same time, one event each."""
    driver = Driver(num_blocks=5, max_num_seqs=3, budget=128, depth=1)
    for seed in range(3):
        driver.add(prompt_of(16 + seed // 2, seed), max_tokens=30, n=1)
    driver.add(prompt_of(8, 5))
    driver.launch()
    driver.launch()
    driver.scheduler.end_all(EndCause.DRAINING, "the worker is leaving", driver.now)
    driver.run(max_steps=3)
    driver.assert_idle()
    assert {end.cause for end in driver.ended.values()} == {EndCause.DRAINING}
    assert len(driver.ended) == 4
