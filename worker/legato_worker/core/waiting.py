"""The waiting sequences in the order in which they are considered for admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from .sequence import Rank, Sequence

_Entry = tuple[Rank, Sequence]


class WaitingQueue:
    """Two sorted lists: preempted sequences and new ones.

    A sequence's rank is fixed (arrival plus its class's ageing), so a waiting one is overtaken only
    by later arrivals of a more urgent class, and by those only for the ageing time. A preempted
    sequence comes before every new one of its own class (fault B020).
    """

    def __init__(self) -> None:
        self._new: list[_Entry] = []
        self._preempted: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._new) + len(self._preempted)

    def push(self, sequence: Sequence) -> None:
        insort(self._list_of(sequence), (sequence.rank, sequence), key=lambda entry: entry[0])

    def remove(self, sequence: Sequence) -> None:
        entries = self._list_of(sequence)
        index = bisect_left(entries, sequence.rank, key=lambda entry: entry[0])
        if index == len(entries) or entries[index][1] is not sequence:
            raise AssertionError("a sequence that is not waiting was removed from the queue")
        del entries[index]

    def __iter__(self) -> Iterator[Sequence]:
        new, preempted, i, j = self._new, self._preempted, 0, 0
        while i < len(new) or j < len(preempted):
            if j == len(preempted) or (i < len(new) and _first(new[i], preempted[j])):
                yield new[i][1]
                i += 1
            else:
                yield preempted[j][1]
                j += 1

    def _list_of(self, sequence: Sequence) -> list[_Entry]:
        return self._preempted if sequence.preemptions else self._new


def _first(new: _Entry, preempted: _Entry) -> bool:
    new_class = new[1].owner.request.request_class
    return new[0] < preempted[0] and new_class < preempted[1].owner.request.request_class
