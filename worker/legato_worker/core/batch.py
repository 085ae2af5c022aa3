"""The messages between scheduler and runner: one step out, one result back.

A row's full data is sent once, when it is attached to a slot; after that a step names slots and
differences only. The runner keeps per-slot state (block table, sampling state) between steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .request import SamplingParams

IN_FLIGHT = -1
"""Input id standing for "the id sampled for this slot by the step still running"."""


class AttachedRow(NamedTuple):
    """A sequence that takes a slot in this step; what the slot held before is gone.

    ``token_ids`` are all known ids, prompt first; ids from ``num_prompt`` on are output (after
    preemption or resume). Penalties count them. ``stop_token_ids`` may not be sampled before the
    sequence has ``min_tokens`` output ids.
    """

    slot: int
    choice: int
    token_ids: tuple[int, ...]
    num_prompt: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    min_tokens: int


class TableUpdate(NamedTuple):
    """``block_ids`` go to the slot's block table from entry ``start`` on (tables are append-only;
    a copy-on-write replaces the last entry)."""

    slot: int
    start: int
    block_ids: tuple[int, ...]


class Sample(NamedTuple):
    """Sample one id for ``slot`` from the last logits of packed row ``row``.

    ``position`` is the index in the sequence that the new id will take. With n > 1 several samples
    share the row in which their common prompt ends.
    """

    row: int
    slot: int
    position: int


@dataclass(slots=True)
class ScheduledBatch:
    """One step. Packed rows: row i computes ``counts[i]`` tokens of slot ``slots[i]`` starting at
    position ``starts[i]``; their ids lie in ``token_ids`` one row after the other.

    The runner applies ``attached``, then ``table_updates``, then ``copies`` (block to block, all
    layers), then runs the rows, then draws ``samples``. Executing a batch twice gives the same KV
    content.
    """

    step: int
    attached: list[AttachedRow] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    prompt_logprob_rows: list[int] = field(default_factory=list)
    """Packed rows whose every position's prompt log probabilities are wanted."""


class TokenLogprobs(NamedTuple):
    """Log probability and rank (1 = best) of one id, and the most likely ids, best first."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True)
class StepResult:
    """What a step gave: one id per entry of ``batch.samples``.

    ``failed`` maps an index of ``samples`` to the reason why that row has no usable id; its mates
    are not affected. ``logprobs`` (by sample index) and ``prompt_logprobs`` (by packed row, one
    entry per computed position p that has a successor in the prompt, describing id p + 1) hold only
    what was asked for.
    """

    step: int
    token_ids: list[int]
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed_rows: dict[int, str] = field(default_factory=dict)
    """Packed rows whose forward pass failed, with or without a sample."""
