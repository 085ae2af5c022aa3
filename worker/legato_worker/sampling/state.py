"""What the sampler knows of each slot: one array per parameter, one entry per slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..core.batch import AttachedRow, Sample
from . import random
from .edits import LogitEdits

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


class Draw(IntEnum):
    """How a row's id is chosen, from cheap to dear."""

    GREEDY = 0
    FROM_ALL = 1  # temperature, with or without min-p
    TOP_K = 2  # with or without top-p and min-p
    TOP_P = 3  # without top-k


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of one step, as columns. ``held``: stop ids are held back by min_tokens;
    ``edited``: single logits change; ``penalized``: counts are needed."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    draw: NDArray[np.uint8]
    held: NDArray[np.bool_]
    edited: NDArray[np.bool_]
    penalized: NDArray[np.bool_]


class SlotParameters:
    """Owner of the slots' sampling parameters, on the host: rows are picked and grouped there, so
    a step needs no answer from the device to know its work."""

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self.draw = np.zeros(max_num_seqs, np.uint8)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.log_min_p = np.zeros(max_num_seqs, np.float32)
        self.stream = np.zeros(max_num_seqs, np.uint64)
        self.penalties = np.zeros((max_num_seqs, 3), np.float32)
        self.penalized = np.zeros(max_num_seqs, np.bool_)
        self.edited = np.zeros(max_num_seqs, np.bool_)
        self.held_until = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.edits: dict[int, LogitEdits] = {}

    def attach(self, row: AttachedRow) -> None:
        """Everything that ``row.slot`` held before is replaced."""
        slot, params = row.slot, row.sampling
        top_k = min(params.top_k or self._vocab_size, self._vocab_size)
        self.draw[slot] = _draw(params.temperature, top_k, params.top_p, self._vocab_size)
        self.temperature[slot] = max(params.temperature, _SMALLEST_TEMPERATURE)
        self.top_k[slot] = top_k
        self.top_p[slot] = params.top_p
        self.log_min_p[slot] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        seed = np.array([params.seed], np.uint64)
        self.stream[slot] = random.output(seed, np.array([row.choice], np.uint64))[0]
        self.penalties[slot] = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.penalized[slot] = bool((self.penalties[slot] != (1, 0, 0)).any())
        edits = LogitEdits.of(row, self._vocab_size)
        self.edited[slot] = (
            len(edits.bias_ids) > 0 or edits.allowed_ids is not None or len(edits.bad_ids) > 0
        )
        self.held_until[slot] = row.num_prompt + row.min_tokens if len(edits.held_ids) else 0
        self.edits[slot] = edits
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs

    def rows(self, samples: Sequence[Sample]) -> SampledRows:
        """The columns of ``samples``."""
        table = np.array(samples, dtype=np.int64)
        slots, positions = table[:, 1], table[:, 2]
        held = positions < self.held_until[slots]
        return SampledRows(
            slots=slots,
            positions=positions,
            draw=self.draw[slots],
            held=held,
            edited=self.edited[slots] | held,
            penalized=self.penalized[slots],
        )

    def keys(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keys of the draws of ``slots`` at ``positions`` (:mod:`.random`), as signed words."""
        return random.output(self.stream[slots], positions.astype(np.uint64)).view(np.int64)


def _draw(temperature: float, top_k: int, top_p: float, vocab_size: int) -> Draw:
    if temperature == 0 or top_k == 1:
        return Draw.GREEDY
    if top_k < vocab_size:
        return Draw.TOP_K
    return Draw.TOP_P if top_p < 1 else Draw.FROM_ALL
