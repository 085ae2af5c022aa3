"""Ledger: promises are kept and returned once."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from legato.errors import LegatoError, Reason
from legato_worker.ledger import Ledger


def test_the_limit_is_those_that_run_and_those_that_may_wait() -> None:
    ledger = Ledger(max_running=2, max_waiting=1)
    for key in (1, 2, 3):
        ledger.reserve(key, 10, 0.5)
    with pytest.raises(LegatoError) as caught:
        ledger.reserve(4, 1, 0.5)
    assert caught.value.reason is Reason.QUEUE_FULL and caught.value.retry_after_s == 0.5
    assert caught.value.metadata == {"limit": "3", "observed": "3"}
    assert ledger.promised_blocks == 30  # a refusal adds nothing (B086)
    ledger.release(2)
    ledger.reserve(4, 1, 0.5)
    assert ledger.promised_blocks == 21


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(1, 50))))
def test_promises_and_releases_balance(actions: list[tuple[bool, int, int]]) -> None:
    """Late and repeated releases are no-ops (B073, B088)."""
    ledger, held = Ledger(max_running=4, max_waiting=2), dict[int, int]()
    for reserve, key, blocks in actions:
        if not reserve:
            ledger.release(key)
            held.pop(key, None)
        elif key not in held and len(held) < 6:
            ledger.reserve(key, blocks, 0.5)
            held[key] = blocks
        assert (len(ledger), ledger.promised_blocks) == (len(held), sum(held.values()))
