"""Admission: what fits, in which order, who may pass whom, and for how long."""

from __future__ import annotations

import pytest
from legato_worker.core.admission import MAX_SCAN
from legato_worker.core.config import SchedulerConfig
from legato_worker.core.policies import OnDemand, Reserve
from legato_worker.core.request import RequestClass
from legato_worker.core.sequence import Sequence

from tests.unit.core.driver import Driver, prompt_of


def test_what_can_never_fit_is_told_before_it_waits() -> None:
    """B014: 8 blocks of 16; a prompt of 129 never fits, one of 128 does and does not block."""
    driver = Driver(num_blocks=8, budget=256)
    assert not driver.scheduler.fits(129, 1, 1)
    assert not driver.scheduler.fits(128, 2, 1)
    assert not driver.scheduler.fits(1, 1, 9)  # more choices than slots
    assert driver.scheduler.fits(128, 1, 1)
    largest = driver.add(prompt_of(128), max_tokens=1)
    short = driver.add(prompt_of(5, 1), max_tokens=5)
    driver.run(max_steps=20)
    driver.assert_solo(largest)
    driver.assert_solo(short)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_fits_exactly_runs(n: int) -> None:
    """``fits`` promises that the request can end alone, copies of shared blocks included."""
    for length in (15, 16, 17, 20):
        blocks = 1
        while not Driver(num_blocks=blocks).scheduler.fits(length, 20, n):
            blocks += 1
        for depth in (0, 1):
            driver = Driver(num_blocks=blocks, depth=depth)
            key = driver.add(prompt_of(length), max_tokens=20, n=n)
            driver.run(max_steps=300)
            driver.assert_idle()
            driver.assert_solo(key)


def blocked_head(max_bypass: int, *, smalls_arrive: int) -> tuple[Driver, int, list[int], int]:
    """A running request leaves no room for a big head, but for the small ones behind it; one more
    small one arrives in each step. Ends when the head has started."""
    driver = Driver(num_blocks=70, max_num_seqs=8, budget=512, chunk=512, max_bypass=max_bypass)
    first = driver.add(prompt_of(480, 0), max_tokens=40)
    driver.step()
    head = driver.add(prompt_of(960, 1), max_tokens=4)
    smalls = [driver.add(prompt_of(60, 2 + seed), max_tokens=4) for seed in range(8)]
    for seed in range(400):
        if driver.rows_of(head):
            return driver, head, smalls, first
        if seed < smalls_arrive:
            driver.add(prompt_of(60, 10 + seed % 6), max_tokens=4)
        driver.step()
    raise AssertionError("the head starved")


def test_small_ones_pass_a_blocked_head_but_only_so_many() -> None:
    """B019: the small ones behind a big prompt are served early, and the head's delay is bounded by
    what runs and ``max_bypass`` others, however many keep coming."""
    driver, head, smalls, first = blocked_head(3, smalls_arrive=400)
    started_before = [key for key in driver.requests if key not in (head, first)]
    started_before = [
        key for key in started_before if driver.rows_of(key)[:1] < driver.rows_of(head)[:1]
    ]
    passed = [key for key in smalls if key in driver.ended]
    assert passed == smalls[:3]
    assert set(driver.ended) == {first, *passed}
    # The bound: the running request's end; those that passed it had ended before that.
    assert driver.rows_of(head)[0][0] == driver.rows_of(first)[-1][0] + 1


def test_nobody_passes_when_no_bypass_is_allowed() -> None:
    driver, _, smalls, _ = blocked_head(0, smalls_arrive=0)
    assert not any(driver.answers[key, 0] for key in smalls)
    served_early, *_ = blocked_head(8, smalls_arrive=0)
    assert all(served_early.answers[key, 0] for key in smalls)


def test_passing_needs_credit_to_count() -> None:
    """A sequence that cannot run for lack of credit uses up nobody's patience."""
    driver = Driver(num_blocks=16, max_num_seqs=8, budget=512, chunk=512, max_bypass=1)
    driver.add(prompt_of(120, 0), max_tokens=30)
    driver.step()
    driver.add(prompt_of(200, 1), max_tokens=4)
    driver.add(prompt_of(20, 2), max_tokens=2, credit=0)
    small = driver.add(prompt_of(20, 3), max_tokens=2)
    for _ in range(4):
        driver.step()
    assert small in driver.ended


def test_a_burst_one_block_too_large_waits_and_ends() -> None:
    """B026: prefills whose estimate exceeds the free blocks by one return to the queue."""
    driver = Driver(num_blocks=8, max_num_seqs=8, budget=512, capacity=OnDemand(watermark=0.0))
    keys = [driver.add(prompt_of(40, seed), max_tokens=8) for seed in range(3)]  # 3 blocks each
    driver.step()
    assert driver.keys_running() == keys[:2]
    driver.run()
    driver.assert_idle()
    for key in keys:
        driver.assert_solo(key)


def test_more_than_a_scan_of_requests_starts_in_one_step() -> None:
    """The bound on looking behind blocked ones does not bound a burst that fits."""
    driver = Driver(num_blocks=128, max_num_seqs=100, budget=1000)
    for seed in range(MAX_SCAN + 16):
        driver.add(prompt_of(5, seed), max_tokens=2)
    driver.step()
    assert len(driver.steps[0]) == MAX_SCAN + 16


def test_requests_without_credit_block_nobody_behind_them() -> None:
    """B064: more paused requests at the head than one scan looks at."""
    driver = Driver(num_blocks=16)
    for seed in range(MAX_SCAN + 16):
        driver.add(prompt_of(5, seed), max_tokens=2, credit=0)
    key = driver.add(prompt_of(20), max_tokens=2)
    for _ in range(3):
        driver.step()
    assert key in driver.ended


def test_a_paused_request_that_does_not_fit_blocks_nobody() -> None:
    """Only what could run if it had KV is waited for."""
    driver = Driver(num_blocks=8, max_bypass=0, budget=256)
    running = driver.add(prompt_of(60, 0), max_tokens=30)
    driver.step()
    paused = driver.add(prompt_of(100, 1), max_tokens=2, credit=0)
    driver.scheduler.table.starve(driver.scheduler.table.requests[paused], driver.now)
    small = driver.add(prompt_of(5, 2), max_tokens=2)
    driver.step()
    driver.step()
    assert small in driver.ended and running not in driver.ended


def test_a_scan_is_bounded() -> None:
    """The host time of a step does not grow with the number of requests that do not fit."""
    driver = Driver(num_blocks=8, max_bypass=100)
    driver.add(prompt_of(60), max_tokens=30)
    driver.step()
    for seed in range(3 * MAX_SCAN):
        driver.add(prompt_of(100, 1 + seed % 8), max_tokens=2)
    looked_at = 0
    match_prefix = driver.kv.match_prefix

    def counted(sequence: Sequence) -> list[int]:
        nonlocal looked_at
        looked_at += 1
        return match_prefix(sequence)

    driver.kv.match_prefix = counted  # type: ignore[method-assign]
    driver.step()
    assert looked_at == MAX_SCAN


def test_reserving_counts_shared_blocks_once() -> None:
    """Two requests with one long prompt fit together only because they share its blocks."""
    driver = Driver(num_blocks=10, capacity=Reserve(), budget=128, chunk=128)
    keys = [driver.add([*prompt_of(96), seed], max_tokens=16) for seed in (1, 2)]
    driver.step()
    driver.step()
    assert driver.keys_running() == keys
    assert driver.pool.num_used == 8


def test_cached_blocks_that_a_request_would_take_are_not_counted_as_left() -> None:
    """The watermark is what is left after an idle prefix has been taken into use."""
    driver = Driver(num_blocks=8, capacity=OnDemand(watermark=0.5), budget=128)
    driver.add(prompt_of(33, 1), max_tokens=1)
    driver.run()
    assert driver.pool.num_cached == 2
    running = driver.add(prompt_of(20), max_tokens=12)
    driver.step()
    # 6 blocks are left, 2 of them the prefix; with 1 more for the rest 3 would be left, not 4.
    hit = driver.add(prompt_of(33, 1), max_tokens=1)
    driver.step()
    assert driver.keys_running() == [running]
    driver.run()
    assert driver.ended[hit].cached_tokens == 32


def test_arrival_order_is_kept_within_a_class() -> None:
    driver = Driver(max_num_seqs=1)
    keys = [driver.add(prompt_of(4, seed), max_tokens=2) for seed in range(5)]
    driver.run()
    assert list(driver.ended) == keys


def test_urgent_ones_overtake_for_the_ageing_time_and_no_longer() -> None:
    """A batch request is passed by interactive ones that come at most ``ageing_s`` later."""
    driver = Driver(max_num_seqs=1, ageing_s=(0.0, 1.0, 10.0))
    running = driver.add(prompt_of(4), max_tokens=2)
    driver.step()
    batch = driver.add(prompt_of(4, 1), 2, arrival_s=0.0, request_class=RequestClass.BATCH)
    in_time = driver.add(prompt_of(4, 2), 2, arrival_s=9.9, request_class=RequestClass.INTERACTIVE)
    too_late = driver.add(
        prompt_of(4, 3), 2, arrival_s=10.1, request_class=RequestClass.INTERACTIVE
    )
    standard = driver.add(prompt_of(4, 4), 2, arrival_s=8.8, request_class=RequestClass.STANDARD)
    driver.run()
    assert list(driver.ended) == [running, standard, in_time, batch, too_late]


def test_zero_ageing_is_first_come_first_served() -> None:
    driver = Driver(max_num_seqs=1, ageing_s=(0.0, 0.0, 0.0))
    keys = [
        driver.add(prompt_of(4, seed), 2, arrival_s=seed * 0.001, request_class=request_class)
        for seed, request_class in enumerate(reversed(RequestClass))
    ]
    driver.run()
    assert list(driver.ended) == keys


def test_a_key_in_use_is_refused() -> None:
    """B010: keys are made by the service; a repeated one is a bug and must not mix two answers."""
    driver = Driver()
    driver.add(prompt_of(4))
    driver.key -= 1
    with pytest.raises(ValueError, match="in use"):
        driver.add(prompt_of(4))


def test_limits_are_checked() -> None:
    limits = {"max_model_len": 64, "vocab_size": 10}
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerConfig(8, 7, 16, **limits)
    with pytest.raises(ValueError, match="max_prefill_chunk"):
        SchedulerConfig(8, 8, 0, **limits)
    with pytest.raises(ValueError, match="max_num_seqs"):
        SchedulerConfig(0, 8, 16, **limits)
