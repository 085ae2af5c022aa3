"""Nothing is kept of a request that has ended."""

from __future__ import annotations

from collections import deque

import pytest
from legato_worker.core.request import RequestClass

from tests.unit.core.driver import Driver, prompt_of


def population(root: object) -> int:
    """Entries of all containers that can be reached from ``root``, through whatever holds them."""
    seen: set[int] = set()
    pending, total = [root], 0
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, (int, float, str, bytes, type)) or item is None:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            total += len(item)
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            total += len(item)
            pending += item
        else:
            pending += getattr(item, "__dict__", {}).values()
            for owner in type(item).__mro__:
                for slot in getattr(owner, "__slots__", ()):
                    pending.append(getattr(item, slot, None))
    return total


def serve(driver: Driver, requests: range) -> None:
    """Tiny requests of every kind: forks, cancels, prefix hits, preemption, deadlines."""
    for number in requests:
        key = driver.add(
            prompt_of(1 + number % 37, number % 11),
            max_tokens=1 + number % 7,
            n=1 + (number % 13 == 0),
            request_class=RequestClass(1 + number % 3),
            deadline_s=driver.now + 0.05 if number % 17 == 0 else None,
            credit=4 if number % 19 == 0 else 1 << 31,
        )
        for _ in range(3):
            driver.step()
        if number % 9 == 0:
            driver.cancel(key)
    driver.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_no_container_grows_with_the_number_of_requests(depth: int) -> None:
    """B037: everything that the scheduler can reach, after 1,000 and after 5,000 more requests."""
    driver = Driver(num_blocks=8, max_num_seqs=4, depth=depth, runner={"verify": False})
    serve(driver, range(1_000))
    driver.assert_idle()
    before = population(driver.scheduler)
    serve(driver, range(5_000))
    driver.assert_idle()
    assert driver.scheduler.table.num_preemptions > 50
    after = population(driver.scheduler)
    # The cache holds other blocks than before (some with a hash more to name them), not more.
    assert abs(after - before) <= 64, (before, after)


def test_every_block_comes_back() -> None:
    """B028: 2,000 short requests of varied length; the count is right at every idle moment."""
    driver = Driver(num_blocks=32, prefix_cache=False, runner={"verify": False})
    for batch in range(100):
        for number in range(20):
            driver.add(
                prompt_of(1 + (batch * 7 + number * 3) % 50, number), max_tokens=1 + number % 9
            )
        driver.run()
        driver.assert_idle()
        assert driver.pool.num_free == 32
    assert len(driver.ended) == 2_000
