"""The small decisions, alone: capacity, batching, order, and the choice of victims."""

from __future__ import annotations

from legato_worker.core.policies import Continuous, Demand, OnDemand, Reserve, Static
from legato_worker.core.preemption import choose_victims
from legato_worker.core.request import Request, RequestClass
from legato_worker.core.sequence import RequestState, Sequence


def demand(**changes: int | bool) -> Demand:
    numbers = {"now": 3, "worst": 5, "available": 10, "outstanding": 0, "num_blocks": 100}
    return Demand(**{**numbers, "idle": False, **changes})  # type: ignore[arg-type]


def test_on_demand_takes_what_is_needed_now_and_keeps_a_watermark() -> None:
    policy = OnDemand(watermark=0.04)
    assert policy.admits(demand(available=7))
    assert not policy.admits(demand(available=6))
    assert policy.admits(demand(available=7, worst=90, outstanding=90))
    # At least one block, however small the pool; none when nothing runs that could grow.
    assert not OnDemand().admits(demand(available=3, num_blocks=8))
    assert OnDemand().admits(demand(available=4, num_blocks=8))
    assert policy.admits(demand(available=3, idle=True))


def test_reserve_covers_the_worst_case_of_all() -> None:
    assert Reserve().admits(demand(worst=5, outstanding=5, available=10))
    assert not Reserve().admits(demand(worst=5, outstanding=6, available=10))


def test_batching_policies() -> None:
    assert Continuous().may_admit(0) and Continuous().may_admit(7)
    assert Static().may_admit(0) and not Static().may_admit(1)


def sequence(
    key: int,
    block_ids: list[int],
    computed: int = 16,
    request_class: RequestClass = RequestClass.STANDARD,
) -> Sequence:
    request = Request(key, (1,), 1, arrival_s=float(key), request_class=request_class)
    made = Sequence(RequestState(request, float(key)), 0, [1])
    made.block_ids, made.num_computed = block_ids, computed
    return made


def victims(candidates: list[Sequence], missing: int, references: list[int]) -> list[int] | None:
    chosen = choose_victims(candidates, missing, references)
    return None if chosen is None else [s.owner.request.key for s in chosen]


def test_the_cheapest_victim_is_enough() -> None:
    """B022: least urgent class, then least computed, then last in order."""
    one = [1] * 8
    assert victims([sequence(1, [0], 99), sequence(2, [1], 7), sequence(3, [2], 50)], 1, one) == [2]
    assert victims([sequence(1, [0], 9), sequence(2, [1], 9), sequence(3, [2], 9)], 1, one) == [3]
    batch = sequence(1, [0], 500, RequestClass.BATCH)
    assert victims([batch, sequence(2, [1], 7)], 1, one) == [1]


def test_blocks_held_by_others_too_do_not_come_free() -> None:
    """Block 0 is shared by both candidates, block 1 with somebody who stays."""
    references = [2, 2, 1]
    both = [sequence(1, [0]), sequence(2, [0])]
    assert victims(both, 1, references) == [2, 1]
    assert victims([sequence(1, [1])], 1, references) is None
    assert victims([sequence(1, [1]), sequence(2, [2], 999)], 1, references) == [2]
    assert victims(both, 2, references) is None
    assert victims([], 1, references) is None


def test_no_victim_is_taken_in_vain() -> None:
    """B017: when a later, larger one frees enough alone, the earlier ones are spared."""
    references = [1] * 8
    small, large = sequence(1, [0], 4), sequence(2, [1, 2, 3], 64)
    assert victims([large, small], 3, references) == [2]
    assert victims([large, small], 4, references) == [1, 2]


def test_who_yields_to_whom() -> None:
    first, second, third = (sequence(key, []) for key in range(3))
    assert second.yields_to(first) and not first.yields_to(second)
    third.rank = (0, *third.rank[1:])
    assert second.yields_to(third) and first.yields_to(third)
    assert not third.yields_to(first)
    first.rank = (0, *first.rank[1:])
    assert not third.yields_to(first), "protected ones do not take from each other"
