"""Picks the next id of every row of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.batch import AttachedRow, Sample, TokenLogprobs
from .edits import apply_edits
from .filters import Cuts, draw_from_all, draw_from_best
from .logprobs import token_logprobs
from .penalties import PenaltyCounts
from .random import increments
from .rows import rows_per_block
from .state import Draw, SampledRows, SlotParameters


@dataclass(slots=True)
class SampleOutput:
    """One id per sample, every one within the vocabulary.

    ``failed`` maps a sample's index to the reason why its id (0 then) must not be used.
    ``logprobs`` holds the samples that asked for them and did not fail.
    """

    token_ids: list[int]
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Owner of all sampling state, by slot. Order of processing: see the package.

    A row's id and log probabilities are a function of its logits, its attached row and the ids
    sampled since, bit for bit. A repeated step gives the same again: state is kept by position.
    Called from one thread.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots = SlotParameters(vocab_size, max_num_seqs)
        self._counts = PenaltyCounts(vocab_size, device)
        self._steps = increments(vocab_size, device)

    @torch.inference_mode()
    def attach(self, row: AttachedRow) -> None:
        """A sequence takes ``row.slot``, new or after preemption; what the slot held is gone."""
        self._slots.attach(row)
        if self._slots.penalized[row.slot]:
            self._counts.attach(row.slot, row.token_ids, row.num_prompt)
        else:
            self._counts.release(row.slot)

    @torch.inference_mode()
    def sample(self, logits: Tensor, samples: Sequence[Sample]) -> SampleOutput:
        """Row i of ``logits`` (float32 ``[S, V]``, left unchanged) gives the id of ``samples[i]``.

        A row with NaN, +inf or nothing above -inf, in the model's logits or after edits and
        penalties, fails alone. Costs one maximum over all rows, one transfer of ids to the host,
        and further passes over those rows alone that are not plainly greedy.
        """
        if logits.shape != (len(samples), self._vocab_size) or logits.dtype != torch.float32:
            raise ValueError(
                f"logits are {logits.dtype} {tuple(logits.shape)}, "
                f"not float32 {(len(samples), self._vocab_size)}"
            )
        if not samples:
            return SampleOutput([])
        rows = self._slots.rows(samples)
        unknown_past = [
            index
            for index in np.flatnonzero(rows.penalized).tolist()
            if not self._counts.rewind(int(rows.slots[index]), int(rows.positions[index]))
        ]

        best, ids = logits.max(dim=-1)  # NaN wins a maximum: one look finds every bad row
        usable = best.isfinite()
        for draw, indices in self._blocks(rows):
            where = self._tensor(indices)
            block_best, ids[where] = self._choose(draw, logits[where], rows, indices)
            usable[where] &= block_best.isfinite()

        output = SampleOutput(ids.masked_fill_(~usable, -1).tolist())
        for index, token_id in enumerate(output.token_ids):
            if not 0 <= token_id < self._vocab_size:
                output.failed[index] = _reason(float(best[index]))
        for index in unknown_past:
            output.failed[index] = "an output id before this position was never sampled"
        for index in output.failed:
            output.token_ids[index] = 0
        self._record(rows, output)
        self._add_logprobs(logits, rows, output)
        return output

    def _blocks(self, rows: SampledRows) -> Iterator[tuple[Draw, NDArray[np.int64]]]:
        """Row indices that need more than the maximum of their logits, alike in how they draw."""
        plain = (rows.draw == Draw.GREEDY) & ~rows.edited & ~rows.penalized
        if plain.all():
            return
        step = rows_per_block(self._vocab_size, self._device)
        for draw in Draw:
            members = np.flatnonzero((rows.draw == draw) & ~plain)
            for start in range(0, len(members), step):
                yield draw, members[start : start + step]

    def _choose(
        self, draw: Draw, logits: Tensor, rows: SampledRows, indices: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Highest logit after edits and penalties, and chosen id, of each row of ``logits`` (a copy
        of rows ``indices``, overwritten)."""
        slots = rows.slots[indices]
        edited = np.flatnonzero(rows.edited[indices])
        if len(edited):
            apply_edits(
                logits,
                [
                    (row, self._slots.edits[int(slots[row])], bool(rows.held[indices[row]]))
                    for row in edited.tolist()
                ],
            )
        penalized = np.flatnonzero(rows.penalized[indices])
        if len(penalized):
            self._counts.apply(
                logits,
                self._tensor(penalized),
                slots[penalized].tolist(),
                self._tensor(self._slots.penalties[slots[penalized]]),
            )
        if draw == Draw.GREEDY:
            best, ids = logits.max(dim=-1)
            return best, ids

        best = logits.amax(dim=-1)
        scale = self._column(self._slots.temperature[slots])
        gaps = logits.sub_(best.unsqueeze(-1)).div_(scale)
        cuts = Cuts(
            top_k=self._column(self._slots.top_k[slots]),
            top_p=self._column(self._slots.top_p[slots]),
            log_min_p=self._column(self._slots.log_min_p[slots]),
            keys=self._column(self._slots.keys(slots, rows.positions[indices])),
        )
        if draw == Draw.FROM_ALL:
            return best, draw_from_all(gaps, cuts, self._steps)
        max_top_k = int(self._slots.top_k[slots].max())
        return best, draw_from_best(gaps, cuts, self._steps, max_top_k)

    def _record(self, rows: SampledRows, output: SampleOutput) -> None:
        counted = [i for i in np.flatnonzero(rows.penalized).tolist() if i not in output.failed]
        if counted:
            self._counts.record(
                rows.slots[counted].tolist(), [output.token_ids[i] for i in counted]
            )

    def _add_logprobs(self, logits: Tensor, rows: SampledRows, output: SampleOutput) -> None:
        wanted = self._slots.num_logprobs[rows.slots]
        asking = [i for i in np.flatnonzero(wanted >= 0).tolist() if i not in output.failed]
        if not asking:
            return
        ids = torch.tensor([output.token_ids[i] for i in asking], device=self._device)
        where = torch.tensor(asking, device=self._device)
        told = token_logprobs(logits[where], ids, wanted[asking].tolist())
        output.logprobs.update(zip(asking, told, strict=True))

    def _column(self, host: NDArray[np.generic]) -> Tensor:
        return self._tensor(host).unsqueeze(-1)

    def _tensor(self, host: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(host).to(self._device)


def _reason(best: float) -> str:
    """Why a row has no id; ``best`` is the highest of the model's own logits."""
    if best != best or best == float("inf"):
        return "the model's logits hold NaN or +inf"
    if best == -float("inf"):
        return "the model's logits are all -inf"
    return "no finite logit is left after bias, masks and penalties"
