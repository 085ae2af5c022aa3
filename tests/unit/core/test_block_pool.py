"""The block pool: three states, eviction order, and an index that never names wrong content."""

from __future__ import annotations

import pytest
from legato_worker.core.block_pool import BlockPool, PoolError

ROOT = b"root"


def filled(pool: BlockPool, *names: int, parent: bytes | int = ROOT) -> list[int]:
    """A chain of used, registered blocks whose tokens and hashes are made from ``names``."""
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for block_id, name in zip(blocks, names, strict=True):
        parent = pool.register(block_id, b"hash %d" % name, (name,), parent)
    return blocks


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
    return pool.num_free, pool.num_cached, pool.num_used


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)
    assert taken is not None and len(set(taken)) == 3
    assert pool.allocate(2) is None
    assert counts(pool) == (1, 0, 3)
    assert pool.allocate(1) is not None
    assert pool.allocate(0) == []


def test_unregistered_blocks_become_free_and_registered_ones_cached() -> None:
    pool = BlockPool(4)
    plain, (known,) = pool.allocate(1), filled(pool, 7)
    assert plain is not None
    pool.release([*plain, known])
    assert counts(pool) == (3, 1, 0)
    assert pool.lookup(b"hash 7", (7,), ROOT) == known
    pool.share([known])
    assert counts(pool) == (3, 0, 1)


def test_a_block_with_two_holders_stays_used_until_both_are_gone() -> None:
    pool = BlockPool(2)
    (block,) = filled(pool, 1)
    pool.share([block])
    pool.release([block])
    assert pool.references[block] == 1 and counts(pool) == (1, 0, 1)
    pool.release([block])
    assert counts(pool) == (1, 1, 0)


def test_releasing_more_often_than_taking_raises() -> None:
    """B029: a double free is an error, not a second entry in the free list."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(PoolError, match="more often"):
        pool.release(blocks)
    assert counts(pool) == (2, 0, 0)


def test_a_free_block_can_be_neither_shared_nor_registered() -> None:
    pool = BlockPool(1)
    with pytest.raises(PoolError, match="cannot be shared"):
        pool.share([0])
    with pytest.raises(PoolError, match="not in use"):
        pool.register(0, b"hash", (1,), ROOT)
    with pytest.raises(PoolError, match="no registered content"):
        pool.lineage(0)


def test_free_blocks_go_before_cached_ones_and_old_ones_before_new_ones() -> None:
    pool = BlockPool(4)
    (first,), (second,) = filled(pool, 1), filled(pool, 2)
    pool.release([second])
    pool.release([first])
    blank = pool.allocate(2)
    assert blank is not None and not {first, second} & set(blank)
    assert pool.allocate(1) == [second]
    assert pool.allocate(1) == [first]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    chain = filled(pool, 1, 2, 3)
    pool.release(chain)
    for evicted in reversed(chain):
        assert pool.allocate(1) == [evicted]


def test_a_shared_cached_block_is_young_again() -> None:
    pool = BlockPool(2)
    (first,), (second,) = filled(pool, 1), filled(pool, 2)
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_an_evicted_block_is_not_found_under_its_old_hash() -> None:
    """B071."""
    pool = BlockPool(1)
    (block,) = filled(pool, 1)
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.lookup(b"hash 1", (1,), ROOT) is None
    pool.register(block, b"hash 2", (2,), ROOT)
    assert pool.lookup(b"hash 1", (1,), ROOT) is None
    assert pool.lookup(b"hash 2", (2,), ROOT) == block
    pool.check()


def test_equal_hashes_of_other_content_miss() -> None:
    """B067: tokens and what precedes them are compared."""
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    number = pool.register(blocks[0], b"same", (1,), ROOT)
    assert pool.lookup(b"same", (1,), ROOT) == blocks[0]
    assert pool.lookup(b"same", (2,), ROOT) is None
    assert pool.lookup(b"same", (1,), b"other root") is None
    assert pool.lookup(b"same", (1,), number) is None
    pool.register(blocks[1], b"same", (2,), ROOT)
    assert pool.lookup(b"same", (2,), ROOT) == blocks[1]
    assert pool.lookup(b"same", (1,), ROOT) is None
    pool.check()


def test_a_child_is_not_found_behind_a_recomputed_parent_of_another_number() -> None:
    """What hangs on evicted content can never be matched again, whatever the hashes say."""
    pool = BlockPool(4)
    parent, child = filled(pool, 1, 2)
    pool.release([parent])
    held = pool.allocate(3)
    assert held is not None and parent in held
    again = pool.register(held[0], b"hash 1", (1,), ROOT)
    assert pool.lookup(b"hash 2", (2,), again) is None
    assert pool.references[child] == 1
    pool.check()


def test_the_first_holder_of_equal_content_stays_the_one() -> None:
    pool = BlockPool(2)
    (first,), (second,) = filled(pool, 1), filled(pool, 1)
    assert pool.lookup(b"hash 1", (1,), ROOT) == first
    pool.release([second])
    assert counts(pool) == (1, 0, 1)


def test_registering_over_a_cached_block_of_the_same_hash_frees_it() -> None:
    pool = BlockPool(2)
    (old,) = filled(pool, 1)
    pool.release([old])
    taken = pool.allocate(1)
    assert taken is not None
    pool.register(taken[0], b"hash 1", (9,), ROOT)
    assert counts(pool) == (1, 0, 1)


def test_reset_forgets_all_content_and_takes_nothing_from_its_users() -> None:
    pool = BlockPool(3)
    (kept,), (idle,) = filled(pool, 1), filled(pool, 2)
    pool.release([idle])
    pool.reset_cache()
    assert counts(pool) == (2, 0, 1)
    assert pool.lookup(b"hash 1", (1,), ROOT) is None and pool.cached_hashes() == []
    pool.release([kept])
    assert counts(pool) == (3, 0, 0)


def test_events_replay_to_the_index() -> None:
    """Stored and removed, in order: applied to a set they give the reusable content."""
    pool = BlockPool(3, record_events=True)
    chain = filled(pool, 1, 2, 3)
    pool.release(chain)
    filled(pool, 4)
    known: set[bytes] = set()
    for stored, block_hash in pool.take_events():
        (known.add if stored else known.remove)(block_hash)
    assert known == set(pool.cached_hashes()) == {b"hash 1", b"hash 2", b"hash 4"}
    assert pool.take_events() == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "two states"),
        (lambda pool: pool._free.append(0), "idle=True"),
        (lambda pool: pool._free.pop(), "idle=False"),
        (lambda pool: pool._index.clear(), "missing from the index"),
        (lambda pool: pool._index.update(wrong=0), "wrong hash"),
    ],
)
def test_check_sees_damage(damage: object, message: str) -> None:
    pool = BlockPool(3)
    filled(pool, 1)
    pool.check()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(PoolError, match=message):
        pool.check()
