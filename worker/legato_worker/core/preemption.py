"""Who loses its KV when a block is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

from .sequence import Sequence


def choose_victims(
    candidates: SequenceOf[Sequence], missing: int, references: list[int]
) -> list[Sequence] | None:
    """A small-loss set of candidates that hold ``missing`` blocks by themselves (blocks shared with
    others do not come free), or None if all together do not.

    ``candidates`` come in order of service. Least urgent class first, then the least computed work
    lost (fault B022), then the last in order. No more are taken than needed (fault B017).
    """
    order = list(reversed(candidates))
    order.sort(key=lambda s: (-s.owner.request.request_class, s.num_computed))
    chosen: list[Sequence] = []
    holders: Counter[int] = Counter()
    freed = 0
    for sequence in order:
        chosen.append(sequence)
        for block_id in sequence.block_ids:
            holders[block_id] += 1
            freed += holders[block_id] == references[block_id]
        if freed >= missing:
            break
    if freed < missing:
        return None
    # A later, larger victim can make earlier ones unnecessary.
    for sequence in chosen[:-1]:
        lost = sum(holders[block_id] == references[block_id] for block_id in sequence.block_ids)
        if freed - lost >= missing:
            chosen.remove(sequence)
            holders.subtract(sequence.block_ids)
            freed -= lost
    return chosen
