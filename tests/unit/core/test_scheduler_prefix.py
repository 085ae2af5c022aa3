"""Prefix cache, end to end: what is reused, when, by whom, and that answers never change."""

from __future__ import annotations

import pytest
from legato.block_hash import cache_root
from legato_worker.core.request import GREEDY

from tests.unit.core.driver import ROOT, Driver, prompt_of


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_the_same_prompt_again(length: int) -> None:
    """B065: twice in turn, then two at once. Equal answers; a hit never writes a shared block."""
    driver = Driver(num_blocks=32)
    first = driver.add(prompt_of(length), sampling=GREEDY)
    driver.run()
    second = driver.add(prompt_of(length), sampling=GREEDY)
    driver.run()
    third, fourth = (driver.add(prompt_of(length), sampling=GREEDY) for _ in range(2))
    while driver.scheduler.has_work:
        batch_starts = len(driver.steps)
        driver.step()
        for row in driver.steps[batch_starts] if len(driver.steps) > batch_starts else []:
            if row.key not in driver.scheduler.table.requests:
                continue
            block = driver.sequence(row.key).block_ids[row.start // 16]
            assert driver.pool.references[block] == 1, "a shared block was written"
    driver.assert_idle()
    hit = (length - 1) // 16 * 16
    for key in (second, third, fourth):
        assert driver.answers[key, 0] == driver.answers[first, 0]
        assert driver.ended[key].cached_tokens == hit
        assert driver.rows_of(key)[0][1].start == hit
    driver.assert_solo(first)


def test_equal_hashes_of_different_prefixes_never_mix() -> None:
    """B067: a hash function that gives one value for everything costs hits, not text."""
    driver = Driver(hash_function=lambda parent, token_ids: b"same")
    keys = [driver.add(prompt_of(40, seed)) for seed in range(4)]
    driver.run()
    keys += [driver.add(prompt_of(40, seed)) for seed in range(4)]
    driver.run()
    driver.assert_idle()
    for key in keys:
        driver.assert_solo(key)


def test_tenants_and_adapters_share_nothing() -> None:
    """B068: adapter "x" without salt, then the base model with salt "x": no hit."""
    driver = Driver()
    roots = [
        cache_root(fingerprint="m", adapter="x"),
        cache_root(fingerprint="m", salt="x"),
        cache_root(fingerprint="m", tenant="x"),
        cache_root(fingerprint="m"),
    ]
    keys = [driver.add(prompt_of(40), cache_root=root) for root in roots]
    driver.run()
    assert [driver.ended[key].cached_tokens for key in keys] == [0, 0, 0, 0]
    again = [driver.add(prompt_of(40), cache_root=root) for root in roots]
    driver.run()
    assert [driver.ended[key].cached_tokens for key in again] == [32, 32, 32, 32]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_is_hit_only_after_its_step_has_ended(depth: int) -> None:
    """B070: B with A's prefix arrives one tick after A was scheduled."""
    driver = Driver(depth=depth, chunk=64, budget=64)
    first = driver.add(prompt_of(48))
    driver.launch()
    second = driver.add([*prompt_of(48), 5])
    assert driver.kv.match_prefix(driver.sequence(second)) == []
    driver.launch()
    assert not driver.rows_of(second)  # it waits for the blocks being computed now
    driver.commit()
    assert len(driver.kv.match_prefix(driver.sequence(second))) == 3
    driver.collect()
    driver.launch()
    assert driver.rows_of(second)[0][1].start == 48
    driver.commit()
    driver.commit()
    driver.collect()
    driver.run()
    driver.assert_idle()
    driver.assert_solo(first)
    driver.assert_solo(second)


def test_who_waits_for_a_block_goes_on_when_its_computer_leaves() -> None:
    driver = Driver(chunk=8, budget=64)
    first = driver.add(prompt_of(48))
    second = driver.add([*prompt_of(48), 5])
    driver.step()
    driver.step()
    driver.step()
    assert not driver.rows_of(second)[1:]
    driver.cancel(first)
    driver.run(max_steps=30)
    driver.assert_idle()
    driver.assert_solo(second)


def test_an_evicted_prefix_is_forgotten() -> None:
    """B071: P1's blocks are evicted and reused for P2; P1 again is a miss with the right answer."""
    driver = Driver(num_blocks=4)
    first = driver.add(prompt_of(40), max_tokens=4)
    driver.run()
    driver.add(prompt_of(60, 1), max_tokens=4)
    driver.run()
    again = driver.add(prompt_of(40), max_tokens=4)
    driver.run()
    assert driver.ended[again].cached_tokens == 0
    assert driver.answers[again, 0] == driver.answers[first, 0]
    driver.assert_solo(again)


def test_answers_are_reusable_too() -> None:
    """The next turn of a conversation hits the blocks of the answer before it."""
    driver = Driver()
    prompt = prompt_of(20)
    first = driver.add(prompt, max_tokens=30)
    driver.run()
    turn = [*prompt, *driver.answers[first, 0], *prompt_of(9, 3)]
    second = driver.add(turn)
    driver.run()
    assert driver.ended[second].cached_tokens == 48
    driver.assert_solo(second)


def test_the_answer_of_a_forked_choice_is_reusable_too() -> None:
    """Its blocks hang on the shared prompt's, also when that was a hit itself."""
    driver = Driver(budget=256)
    prompt = prompt_of(32)
    driver.add([*prompt, 1], max_tokens=1)
    driver.run()
    many = driver.add([*prompt, 5, 6], max_tokens=32, n=2)
    driver.run()
    for choice in range(2):
        turn = [*prompt, 5, 6, *driver.answers[many, choice], 7]
        key = driver.add(turn, max_tokens=1)
        driver.run()
        assert driver.ended[key].cached_tokens == 64


def test_running_blocks_are_shared_and_survive_their_first_holder() -> None:
    driver = Driver()
    first = driver.add(prompt_of(40), max_tokens=30)
    driver.step()
    second = driver.add([*prompt_of(40), 9], max_tokens=30)
    driver.step()
    assert driver.sequence(second).block_ids[:2] == driver.sequence(first).block_ids[:2]
    driver.cancel(first)
    driver.run()
    driver.assert_idle()
    driver.assert_solo(second)


def test_hits_are_counted_once_and_not_for_recompute() -> None:
    """B107: each prompt is one query when it is scheduled, however long it waited before."""
    driver = Driver(num_blocks=5, max_num_seqs=3, budget=128)
    lengths = (16, 16, 17)
    for seed, length in enumerate(lengths):
        driver.add(prompt_of(length, seed), max_tokens=20)
    driver.run()
    counters = driver.scheduler.counters()
    assert counters.preemptions > 0
    assert counters.prefix_queried_tokens == sum(lengths) and counters.prefix_hit_tokens == 0
    driver.add(prompt_of(17, 2))
    driver.run()
    counters = driver.scheduler.counters()
    assert counters.prefix_queried_tokens == sum(lengths) + 17
    assert counters.prefix_hit_tokens == 16


def test_a_reset_cache_changes_no_answer() -> None:
    driver = Driver()
    keys = [driver.add(prompt_of(40, seed % 2), max_tokens=30) for seed in range(4)]
    for _ in range(6):
        driver.step()
    driver.pool.reset_cache()
    driver.run()
    again = driver.add(prompt_of(40), max_tokens=30)
    driver.run()
    driver.assert_idle()
    for key in [*keys, again]:
        driver.assert_solo(key)


def test_events_tell_what_is_reusable() -> None:
    """What a router learns from stored and removed events is the worker's index."""
    driver = Driver(num_blocks=6)
    driver.pool._record_events = True
    known: set[bytes] = set()
    for seed in range(12):
        driver.add(prompt_of(40, seed % 5), max_tokens=12)
        driver.run()
        for stored, block_hash in driver.pool.take_events():
            (known.add if stored else known.remove)(block_hash)
        assert known == set(driver.pool.cached_hashes())
    assert ROOT not in known
