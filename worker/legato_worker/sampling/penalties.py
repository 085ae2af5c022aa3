"""Repetition, frequency and presence penalties, and the token counts that they need.

Counts come from token ids and positions, never from what happened to be computed: a warm prefix, a
preemption, a resume or a repeated step leaves them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _History:
    """Output ids of one sequence; entry i sits at position ``num_prompt + i``."""

    row: int
    num_prompt: int
    output_ids: list[int]


class PenaltyCounts:
    """Owner of the token counts of the slots whose sequences use penalties, and of no others.

    One dense row of marks per such slot, int32 ``[capacity, V]`` on ``device``, taken on first need
    and given back by :meth:`release`. A token's mark is twice its number of occurrences in the
    output, plus 1 if it is in the prompt: not 0 means seen.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._histories: dict[int, _History] = {}
        self._free_rows: list[int] = []
        self._marks = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def attach(self, slot: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """``slot`` now holds a sequence with these ids, output from ``num_prompt`` on."""
        self.release(slot)
        if not self._free_rows:
            self._grow()
        history = _History(self._free_rows.pop(), num_prompt, list(token_ids[num_prompt:]))
        self._histories[slot] = history
        marks = self._marks[history.row]
        outputs = self._known(history.output_ids)
        marks.copy_(torch.bincount(outputs, minlength=self._vocab_size)).mul_(2)
        marks[self._known(token_ids[:num_prompt])] += 1  # once, however often an id occurs

    def release(self, slot: int) -> None:
        """Forget ``slot``, if it is known."""
        history = self._histories.pop(slot, None)
        if history is not None:
            self._free_rows.append(history.row)

    def rewind(self, slot: int, position: int) -> bool:
        """Make the counts of ``slot`` those before ``position``: a repeated step takes back what
        its first run recorded. False when an id before ``position`` was never recorded."""
        history = self._histories[slot]
        outputs = history.output_ids
        keep = max(0, position - history.num_prompt)
        if len(outputs) > keep:
            undone = torch.bincount(self._known(outputs[keep:]), minlength=self._vocab_size)
            self._marks[history.row] -= 2 * undone
            del outputs[keep:]
        return history.num_prompt + len(outputs) == position

    def record(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """The next output of each slot; ids are within the vocabulary, slots differ."""
        for slot, token_id in zip(slots, token_ids, strict=True):
            self._histories[slot].output_ids.append(token_id)
        self._marks[self._rows(slots), torch.tensor(token_ids, device=self._device)] += 2

    def apply(self, logits: Tensor, rows: Tensor, slots: Sequence[int], strengths: Tensor) -> None:
        """Penalises rows ``rows`` (int64) of ``logits`` (float32 ``[R, V]``) in place; ``slots``
        are the slots of those rows.

        ``strengths``, float32 ``[len(rows), 3]``: repetition (divides positive and multiplies
        negative logits of ids seen in prompt or output: Keskar et al., CTRL, 2019), presence
        (subtracted once from ids in the output), frequency (subtracted per occurrence in it).
        """
        marks = self._marks[self._rows(slots)]
        # A text uses few of the vocabulary's ids: all arithmetic is on those alone.
        which, ids = marks.nonzero(as_tuple=True)
        repetition, presence, frequency = strengths[which].unbind(dim=-1)
        counts = marks[which, ids] >> 1
        where = (rows[which], ids)
        values = logits[where]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[where] = values - presence * (counts > 0) - frequency * counts

    def _known(self, token_ids: Sequence[int]) -> Tensor:
        """Those within the vocabulary; others cannot be generated, so their counts are no use."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        return ids[(ids >= 0) & (ids < self._vocab_size)]

    def _rows(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor([self._histories[slot].row for slot in slots], device=self._device)

    def _grow(self) -> None:
        old = len(self._marks)
        new = max(1, old)
        self._marks = torch.cat([self._marks, self._marks.new_zeros((new, self._vocab_size))])
        self._free_rows = list(range(old, old + new))
