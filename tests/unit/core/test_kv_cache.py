"""Blocks of sequences: prefix match, growth, copy-on-write, and the step fence."""

from __future__ import annotations

import pytest
from legato.block_hash import block_hash, cache_root
from legato_worker.core.block_pool import BlockPool
from legato_worker.core.kv_cache import KVCacheManager
from legato_worker.core.request import Request, SamplingParams
from legato_worker.core.sequence import RequestState, Sequence

from tests.unit.core.driver import ROOT, prompt_of

SIZE = 4


def manager(num_blocks: int = 8, *, prefix_cache: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), SIZE, block_hash, prefix_cache=prefix_cache)


def sequence_of(
    token_ids: list[int], root: bytes = ROOT, sampling: SamplingParams | None = None
) -> Sequence:
    request = Request(
        1, tuple(token_ids), 8, cache_root=root, sampling=sampling or SamplingParams()
    )
    return Sequence(RequestState(request, 0.0), 0, list(token_ids))


def compute(kv: KVCacheManager, sequence: Sequence) -> None:
    """As if a step had computed all known tokens and ended."""
    assert kv.admit(sequence, kv.match_prefix(sequence))
    sequence.num_computed = len(sequence.token_ids)
    kv.register(sequence, sequence.num_computed)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_the_last_token_is_always_left_to_compute(length: int) -> None:
    """B065: a whole-prompt hit still computes its last token, in a block of its own."""
    kv = manager()
    first, second = sequence_of(prompt_of(length)), sequence_of(prompt_of(length))
    compute(kv, first)
    matched = kv.match_prefix(second)
    assert matched == first.block_ids[: (length - 1) // SIZE]
    assert kv.admit(second, matched)
    assert second.num_computed == len(matched) * SIZE < length
    written = second.block_ids[second.num_computed // SIZE]
    assert written not in first.block_ids and kv.pool.references[written] == 1
    kv.check([first, second])


def test_a_block_is_matchable_only_once_it_is_registered() -> None:
    """B070: taking blocks does not make them reusable; the end of the step does."""
    kv = manager()
    first, second = sequence_of(prompt_of(9)), sequence_of(prompt_of(9))
    assert kv.admit(first, [])
    assert kv.match_prefix(second) == []
    assert kv.computing_next_block(second, 0)
    kv.register(first, SIZE + 1)
    assert kv.match_prefix(second) == first.block_ids[:1]
    assert kv.computing_next_block(second, 1)
    kv.register(first, 9)
    assert kv.match_prefix(second) == first.block_ids[:2]
    assert not kv.computing_next_block(second, 2)


def test_nobody_waits_for_a_block_whose_sequence_has_left() -> None:
    kv = manager()
    first, second = sequence_of(prompt_of(9)), sequence_of(prompt_of(9))
    assert kv.admit(first, [])
    assert kv.computing_next_block(second, 0)
    kv.free(first, slot=0)
    assert not kv.computing_next_block(second, 0)
    kv.check([])


def test_two_computing_the_same_block_are_counted() -> None:
    kv = manager()
    first, second, third = (sequence_of(prompt_of(6)) for _ in range(3))
    assert kv.admit(first, []) and kv.admit(second, [])
    kv.free(first, slot=0)
    assert kv.computing_next_block(third, 0)
    kv.free(second, slot=1)
    assert not kv.computing_next_block(third, 0)


def test_another_root_shares_nothing() -> None:
    """B068: adapter "x" without salt and salt "x" without adapter are two key spaces."""
    roots = [
        cache_root(fingerprint="m"),
        cache_root(fingerprint="m", adapter="x"),
        cache_root(fingerprint="m", salt="x"),
        cache_root(fingerprint="m", tenant="x"),
        cache_root(fingerprint="m", tenant="x", salt="x"),
        cache_root(fingerprint="mx"),
    ]
    kv = manager(num_blocks=32)
    for root in roots:
        sequence = sequence_of(prompt_of(9), root)
        assert kv.match_prefix(sequence) == []
        compute(kv, sequence)
        assert len(kv.match_prefix(sequence)) == 2


def test_prompt_logprobs_need_every_position_computed() -> None:
    kv = manager()
    wants = SamplingParams(prompt_logprobs=0)
    compute(kv, sequence_of(prompt_of(9)))
    assert kv.match_prefix(sequence_of(prompt_of(9), sampling=wants)) == []
    assert not kv.computing_next_block(sequence_of(prompt_of(9), sampling=wants), 0)


def test_without_prefix_cache_nothing_is_kept() -> None:
    kv = manager(prefix_cache=False)
    sequence = sequence_of(prompt_of(9))
    compute(kv, sequence)
    assert kv.match_prefix(sequence_of(prompt_of(9))) == []
    kv.free(sequence, slot=0)
    assert kv.pool.num_free == kv.pool.num_blocks


def test_admission_takes_all_blocks_or_none() -> None:
    """B026: a shortage gives False and leaves every count as it was."""
    kv = manager(num_blocks=4)
    first, second = sequence_of(prompt_of(8)), sequence_of([*prompt_of(8), *prompt_of(8, 1)])
    compute(kv, first)
    kv.free(first, slot=0)
    matched = kv.match_prefix(second)
    assert len(matched) == 2
    blocker = sequence_of(prompt_of(4, 5))
    assert kv.admit(blocker, [])
    assert not kv.admit(second, matched)
    assert second.block_ids == [] and second.num_computed == 0
    assert (kv.pool.num_free, kv.pool.num_cached, kv.pool.num_used) == (1, 2, 1)
    kv.check([blocker])


def test_growth_takes_a_block_at_each_boundary_and_only_there() -> None:
    kv = manager(num_blocks=3)
    sequence = sequence_of(prompt_of(3))
    compute(kv, sequence)
    assert kv.is_writable(sequence)
    sequence.num_computed = SIZE
    assert not kv.is_writable(sequence)
    index, block_id, source = kv.append(sequence, step=1) or (None, None, None)
    assert (index, source) == (1, -1) and sequence.block_ids[1] == block_id
    assert kv.is_writable(sequence)


def test_the_first_to_write_a_shared_block_copies_it() -> None:
    kv = manager(num_blocks=4)
    leader = sequence_of(prompt_of(6))
    compute(kv, leader)
    fork = sequence_of(prompt_of(6))
    kv.fork(leader, fork)
    full, partial = leader.block_ids
    assert fork.block_ids == [full, partial]
    assert not kv.is_writable(leader)
    update = kv.append(leader, step=5)
    assert update is not None
    index, copy, source = update
    assert (index, source) == (1, partial) and leader.block_ids == [full, copy]
    # The copy is made in step 5, so its source must outlive that step.
    assert kv.num_fenced == 1 and kv.pool.references[partial] == 2
    kv.complete(5)
    assert kv.num_fenced == 0 and kv.pool.references[partial] == 1
    assert kv.is_writable(fork)
    kv.check([leader, fork])


def test_an_empty_pool_appends_nothing() -> None:
    kv = manager(num_blocks=1)
    sequence = sequence_of(prompt_of(4))
    compute(kv, sequence)
    assert kv.append(sequence, step=1) is None
    assert len(sequence.block_ids) == 1


def test_blocks_and_slot_come_back_when_the_last_step_with_them_has_ended() -> None:
    """B031, B017: they are counted meanwhile."""
    kv = manager(num_blocks=2)
    sequence = sequence_of(prompt_of(5))
    assert kv.admit(sequence, [])
    sequence.last_step = 7
    kv.complete(6)
    assert kv.free(sequence, slot=3) == []
    assert kv.num_fenced == 2 and kv.pool.num_available == 0
    kv.check([])
    assert kv.complete(7) == [3]
    assert kv.num_fenced == 0 and kv.pool.num_free == 2


def test_blocks_that_no_step_works_on_come_back_at_once() -> None:
    kv = manager(num_blocks=2)
    sequence = sequence_of(prompt_of(5))
    assert kv.admit(sequence, [])
    sequence.last_step = 7
    kv.complete(7)
    assert kv.free(sequence, slot=3) == [3]
    assert kv.pool.num_free == 2


def test_check_sees_a_reference_without_holder() -> None:
    kv = manager()
    sequence = sequence_of(prompt_of(5))
    compute(kv, sequence)
    kv.check([sequence])
    with pytest.raises(AssertionError, match="holders"):
        kv.check([])
