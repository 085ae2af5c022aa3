"""Preemption: who loses its KV, how much, how often, and that everything ends nevertheless."""

from __future__ import annotations

from itertools import permutations, product
from random import Random

import pytest
from legato_worker.core.policies import OnDemand, Reserve
from legato_worker.core.request import Request, RequestClass
from legato_worker.core.sequence import RequestState, Sequence
from legato_worker.core.waiting import WaitingQueue

from tests.unit.core.driver import Driver, prompt_of

CLASSES = (RequestClass.INTERACTIVE, RequestClass.BATCH)


@pytest.mark.parametrize(
    ("depth", "classes", "order"),
    list(product((0, 1), product(CLASSES, CLASSES), permutations((0, 1)))),
)
def test_two_requests_of_sixty_percent_each_both_end(
    depth: int, classes: tuple[RequestClass, ...], order: tuple[int, ...]
) -> None:
    """B016: each needs 60% of the pool, and the budget is below the prompt length."""
    driver = Driver(num_blocks=10, max_num_seqs=2, budget=8, chunk=8, depth=depth)
    keys = [
        driver.add(prompt_of(40, seed), max_tokens=57, request_class=classes[seed])
        for seed in order
    ]
    tokens = 2 * (40 + 57)
    steps = driver.run(max_steps=2 * tokens)
    driver.assert_idle()
    for key in keys:
        driver.assert_solo(key)
        assert driver.ended[key].preemptions <= driver.scheduler.config.max_preemptions
    assert steps <= 2 * tokens


@pytest.mark.parametrize("depth", [0, 1])
def test_the_first_in_rank_is_never_a_victim(depth: int) -> None:
    """B016: eight requests in a pool that holds two of them; each is at some time the first."""
    driver = Driver(num_blocks=8, max_num_seqs=8, depth=depth, max_preemptions=2)
    keys = [driver.add(prompt_of(20, seed), max_tokens=40) for seed in range(8)]
    while driver.scheduler.has_work:
        running = driver.scheduler.table.running
        first = running[0] if running else None
        lost = first.owner.preemptions if first else 0
        driver.step()
        assert first is None or first.owner.preemptions == lost
    driver.assert_idle()
    assert driver.scheduler.table.num_preemptions > 0
    for key in keys:
        driver.assert_solo(key)
        assert driver.ended[key].preemptions <= 2


def test_a_full_pool_costs_one_victim_and_then_waits() -> None:
    """B017: at depth 1 a victim's blocks come back a step later; nobody else is evicted for the
    same missing block meanwhile."""
    driver = Driver(num_blocks=13, budget=256, depth=1)
    keys = [driver.add(prompt_of(32, seed), max_tokens=20) for seed in range(6)]
    driver.launch()  # all prompts; 12 of 13 blocks
    assert driver.pool.num_available == 1
    driver.launch()  # all six want a block: one is there, one victim is evicted, the others wait
    table = driver.scheduler.table
    assert table.num_preemptions == 1
    assert driver.kv.num_fenced == 2 and driver.pool.num_available == 0
    assert [row.key for row in driver.steps[-1]] == keys[:1]
    driver.commit()
    driver.collect()
    # The victim's two blocks are back: two that waited take them, the third takes the place of
    # the last, whose blocks no step works on and which come back at once.
    driver.launch()
    assert table.num_preemptions == 2
    assert [row.key for row in driver.steps[-1]] == keys[:4]
    while driver.scheduler.num_in_flight:
        driver.commit()
    driver.collect()
    driver.run()
    driver.assert_idle()
    for key in keys:
        driver.assert_solo(key)


def test_nothing_is_admitted_in_the_step_of_a_preemption() -> None:
    """What the victim gave up is not handed to a newcomer in the same breath."""
    driver = Driver(num_blocks=8, budget=256, max_num_seqs=4)
    keys = [driver.add(prompt_of(length, length), max_tokens=20) for length in (16, 15, 75)]
    driver.step()
    small = driver.add(prompt_of(5), max_tokens=2)
    while not driver.scheduler.table.num_preemptions:
        driver.step()
        assert len(driver.steps) < 30
    if small in driver.requests and driver.rows_of(small):
        assert driver.rows_of(small)[0][0] != len(driver.steps)
    driver.run()
    for key in [*keys, small]:
        driver.assert_solo(key)


def test_a_younger_row_never_takes_from_an_older_one() -> None:
    """Not even from an older prompt of which little is computed yet."""
    driver = Driver(num_blocks=8, chunk=16, budget=16, max_num_seqs=3)
    old = driver.add(prompt_of(80), max_tokens=10)  # five blocks, five steps
    young = [driver.add(prompt_of(15, seed), max_tokens=30, arrival_s=0.5) for seed in (1, 2)]
    driver.run()
    assert driver.ended[old].preemptions == 0
    for key in [old, *young]:
        driver.assert_solo(key)


def test_the_victim_is_the_one_that_loses_least() -> None:
    """B022: a row with 4,000 computed tokens and one with 16, in both orders."""
    for long_first in (True, False):
        driver = Driver(num_blocks=258, budget=4096, chunk=4096, runner={"verify": False})
        first = driver.add(prompt_of(24), max_tokens=40)
        lengths = (4000, 16) if long_first else (16, 4000)
        second, third = (
            driver.add(prompt_of(length, seed), max_tokens=30)
            for seed, length in enumerate(lengths, 1)
        )
        long, short = (second, third) if long_first else (third, second)
        driver.run()
        assert driver.ended[short].preemptions == 1
        assert driver.ended[long].preemptions == driver.ended[first].preemptions == 0
        # The share of work done twice is exported, per request and in all.
        recomputed = driver.scheduler.counters().recomputed_tokens
        assert 0 < recomputed == driver.ended[short].recomputed_tokens < 100


def test_of_equal_losses_the_last_in_rank_is_taken() -> None:
    driver = Driver(num_blocks=7, max_num_seqs=3, budget=128)
    keys = [driver.add(prompt_of(32, seed), max_tokens=20) for seed in range(3)]
    driver.step()
    driver.step()
    assert [driver.scheduler.table.requests[key].preemptions for key in keys] == [0, 0, 1]


def test_a_less_urgent_class_is_evicted_first() -> None:
    """A batch row loses its KV to a standard one although it has computed more."""
    driver = Driver(num_blocks=8, max_num_seqs=4, budget=256, ageing_s=(0.0, 0.0, 0.0))
    first, second = (driver.add(prompt_of(16, seed), max_tokens=10) for seed in range(2))
    batch = driver.add(prompt_of(40, 2), max_tokens=10, request_class=RequestClass.BATCH)
    standard = driver.add(prompt_of(20, 3), max_tokens=10)
    driver.step()
    driver.step()  # the first takes the last block, the second has to take one away
    preempted = {key: owner.preemptions for key, owner in driver.scheduler.table.requests.items()}
    assert preempted == {first: 0, second: 0, batch: 1, standard: 0}


def test_preempted_ones_come_before_new_ones_of_their_class() -> None:
    """B020: A was running and lost its KV; B arrived earlier and never started."""
    queue = WaitingQueue()

    def waiting(key: int, arrival_s: float, preemptions: int, klass: RequestClass) -> Sequence:
        request = Request(key, (1,), 1, arrival_s=arrival_s, request_class=klass)
        sequence = Sequence(RequestState(request, arrival_s), 0, [1])
        sequence.preemptions = preemptions
        queue.push(sequence)
        return sequence

    earlier = waiting(1, 0.0, 0, RequestClass.STANDARD)
    preempted = waiting(2, 5.0, 1, RequestClass.STANDARD)
    urgent = waiting(3, 4.0, 0, RequestClass.INTERACTIVE)
    late_urgent = waiting(4, 6.0, 0, RequestClass.INTERACTIVE)
    queue.remove(earlier)
    assert list(queue) == [urgent, preempted, late_urgent]
    queue.push(earlier)
    assert list(queue) == [preempted, earlier, urgent, late_urgent]
    with pytest.raises(AssertionError, match="not waiting"):
        queue.remove(Sequence(preempted.owner, 1, [1]))


def test_a_preempted_request_resumes_before_an_earlier_one_that_never_started() -> None:
    """B020, end to end: B does not fit and is passed by A; A is preempted by the first request and
    comes back before B starts. What it computes twice is counted."""
    driver = Driver(num_blocks=12, max_num_seqs=4, budget=256)
    first = driver.add(prompt_of(100, 0), max_tokens=60)  # grows from 7 to 10 blocks
    driver.step()
    big = driver.add(prompt_of(150, 1), max_tokens=10)
    passing = driver.add(prompt_of(50, 2), max_tokens=20)
    driver.run()
    driver.assert_idle()
    assert driver.ended[passing].preemptions >= 1
    assert driver.ended[passing].recomputed_tokens > 0
    last_step_of_passing = driver.rows_of(passing)[-1][0]
    assert driver.rows_of(big)[0][0] > last_step_of_passing
    for key in (first, big, passing):
        driver.assert_solo(key)


def crowd(seed: int, depth: int, max_preemptions: int) -> tuple[Driver, int]:
    """Fourteen small requests in a pool for two or three; the most preemptions that one has had."""
    random = Random(seed)
    driver = Driver(
        num_blocks=random.choice((10, 14, 20)),
        block_size=random.choice((1, 2, 4)),
        chunk=16,
        depth=depth,
        max_preemptions=max_preemptions,
        prefix_cache=False,
    )
    for number in range(14):
        length, max_tokens = random.randint(1, 6), random.choice((2, 3, 5, 8, 12, 16))
        if driver.scheduler.fits(length, max_tokens, 1):
            driver.add(prompt_of(length, number), max_tokens)
    driver.run(max_steps=500)
    driver.assert_idle()
    for key in driver.requests:
        driver.assert_solo(key)
    return driver, max(end.preemptions for end in driver.ended.values())


def test_preemptions_of_each_are_bounded_and_then_its_worst_case_is_covered() -> None:
    """After ``max_preemptions`` a request comes back ahead of all others and keeps its KV. Without
    that, these crowds take the KV of one of them up to six times."""
    assert max(crowd(seed, 0, 10**9)[1] for seed in (26, 27, 36, 56, 287)) >= 5
    for seed in (*range(20, 40), 56, 287):
        for depth in (0, 1):
            for limit in (1, 2, 3):
                assert crowd(seed, depth, limit)[1] <= limit


@pytest.mark.parametrize("depth", [0, 1])
def test_reserving_never_preempts(depth: int) -> None:
    """The same load that preempts on demand runs without a single preemption."""
    for capacity, preempts in ((OnDemand(), True), (Reserve(), False)):
        driver = Driver(num_blocks=8, capacity=capacity, depth=depth)
        keys = [driver.add(prompt_of(20, seed), max_tokens=40, n=1 + seed % 2) for seed in range(8)]
        driver.run()
        driver.assert_idle()
        assert bool(driver.scheduler.table.num_preemptions) is preempts
        for key in keys:
            driver.assert_solo(key)


def preempted_in_flight(max_tokens: int) -> tuple[Driver, list[int]]:
    """Depth 1: step 1 computes three prompts; while it runs, the third loses its KV."""
    driver = Driver(num_blocks=5, max_num_seqs=3, budget=128, depth=1)
    keys = [driver.add(prompt_of(16, seed), max_tokens=30) for seed in range(2)]
    keys.append(driver.add(prompt_of(17, 2), max_tokens=max_tokens))
    driver.launch()
    driver.launch()
    victim = driver.sequence(keys[2])
    assert victim.preemptions == 1 and victim.num_in_flight == 1 and len(victim.token_ids) == 17
    driver.commit()
    driver.collect()
    return driver, keys


def test_an_id_sampled_for_a_preempted_sequence_counts() -> None:
    driver, keys = preempted_in_flight(max_tokens=30)
    assert len(driver.answers[keys[2], 0]) == 1
    driver.run()
    driver.assert_idle()
    for key in keys:
        driver.assert_solo(key)


def test_an_answer_may_end_while_its_sequence_waits_without_kv() -> None:
    """The id in flight at the preemption was the last one."""
    driver, keys = preempted_in_flight(max_tokens=1)
    assert keys[2] in driver.ended and not driver.scheduler.table.waiting
    driver.run()
    driver.assert_idle()
    for key in keys:
        driver.assert_solo(key)


@pytest.mark.parametrize("num_blocks", [5, 64])
def test_a_preempted_sequence_comes_back_only_with_its_id_in_flight(num_blocks: int) -> None:
    """Its row is attached with all its ids, so it waits for the one that is still to come."""
    driver = Driver(num_blocks=num_blocks, depth=1)
    key = driver.add(prompt_of(20), max_tokens=10)
    driver.launch()
    driver.scheduler.table.preempt(driver.sequence(key))
    assert not driver.launch()
    driver.commit()
    driver.collect()
    driver.run()
    driver.assert_idle()
    driver.assert_solo(key)


def test_a_preemption_does_not_change_when_a_request_is_said_to_have_started() -> None:
    driver, keys = preempted_in_flight(max_tokens=30)
    driver.now = 5.0
    driver.run()
    end = driver.ended[keys[2]]
    assert end.preemptions and end.queue_s == 0.0 and end.cached_tokens == 0
