"""Who loses its KV when a block is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from .sequence import Sequence


def choose_victims(
    candidates: Iterable[Sequence], missing: int, num_references: Callable[[int], int]
) -> list[Sequence] | None:
    """A small-loss set of candidates that hold ``missing`` blocks by themselves (blocks shared with
    others do not come free), or None if all together do not.

    Least urgent class first, then the least computed work lost (fault B022). No more are taken than
    needed (fault B017).
    """
    order = sorted(
        candidates, key=lambda s: (-s.owner.request.request_class, s.num_computed, s.rank)
    )
    chosen: list[Sequence] = []
    holders: Counter[int] = Counter()
    freed = 0
    for sequence in order:
        chosen.append(sequence)
        for block_id in sequence.block_ids:
            holders[block_id] += 1
            freed += holders[block_id] == num_references(block_id)
        if freed >= missing:
            break
    if freed < missing:
        return None
    # A later, larger victim can make earlier ones unnecessary.
    for sequence in chosen[:-1]:
        lost = sum(holders[block_id] == num_references(block_id) for block_id in sequence.block_ids)
        if freed - lost >= missing:
            chosen.remove(sequence)
            holders.subtract(sequence.block_ids)
            freed -= lost
    return chosen
