"""Changes to single logits: bias, allowed ids, forbidden ids, stop ids held back by min_tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.batch import AttachedRow


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of one sequence; every array of ids is int64 and holds an id once.

    ``allowed_ids``: None = all. ``held_ids`` are forbidden until ``min_tokens`` outputs exist. Ids
    outside the vocabulary cannot be generated anyway, so they are left out.
    """

    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    allowed_ids: NDArray[np.int64] | None
    bad_ids: NDArray[np.int64]
    held_ids: NDArray[np.int64]

    @classmethod
    def of(cls, row: AttachedRow, vocab_size: int) -> LogitEdits:
        """The edits that ``row`` asks for. Biases of the same id add up."""
        bias: dict[int, float] = {}
        for token_id, amount in row.sampling.logit_bias:
            if 0 <= token_id < vocab_size:
                bias[token_id] = bias.get(token_id, 0.0) + amount
        allowed = row.sampling.allowed_token_ids
        return cls(
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias=np.fromiter(bias.values(), np.float32, len(bias)),
            allowed_ids=_known(allowed, vocab_size) if allowed else None,
            bad_ids=_known(row.sampling.bad_token_ids, vocab_size),
            held_ids=_known(row.stop_token_ids if row.min_tokens else (), vocab_size),
        )


def apply_edits(logits: Tensor, edits: Sequence[tuple[int, LogitEdits, bool]]) -> None:
    """Edits ``logits`` (float32 ``[R, V]``, contiguous) in place.

    An entry names a row, its edits, and whether its stop ids are held back now. All rows are edited
    together, by their flat indices, so the number of device operations does not grow with them.
    """
    vocab_size = logits.shape[-1]
    flat = logits.view(-1)

    def indices(parts: list[tuple[int, NDArray[np.int64]]]) -> Tensor:
        host = np.concatenate([row * vocab_size + ids for row, ids in parts])
        return torch.from_numpy(host).to(logits.device)

    biased = [(row, e) for row, e, _ in edits if len(e.bias_ids)]
    if biased:
        where = indices([(row, e.bias_ids) for row, e in biased])
        amounts = torch.from_numpy(np.concatenate([e.bias for _, e in biased])).to(logits.device)
        flat[where] += amounts

    allowed = [(row, e.allowed_ids) for row, e, _ in edits if e.allowed_ids is not None]
    if allowed:
        where = indices(allowed)
        kept = flat[where]
        logits[torch.tensor([row for row, _ in allowed], device=logits.device)] = -torch.inf
        flat[where] = kept

    forbidden = [(row, e.bad_ids) for row, e, _ in edits if len(e.bad_ids)]
    forbidden += [(row, e.held_ids) for row, e, held in edits if held and len(e.held_ids)]
    if forbidden:
        flat[indices(forbidden)] = -torch.inf


def _known(ids: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    known = sorted({i for i in ids if 0 <= i < vocab_size})
    return np.array(known, dtype=np.int64)
