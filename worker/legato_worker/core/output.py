"""What the scheduler tells the world after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from .batch import TokenLogprobs
from .request import FinishReason


class EndCause(StrEnum):
    """Why a request ended other than by its choices' own ends. Names equal wire reasons."""

    INTERNAL = "INTERNAL"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # before the first token
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    SLOW_READER = "SLOW_READER"
    DRAINING = "DRAINING"


class EndedChoice(NamedTuple):
    key: int
    choice: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The one terminal event of a request. ``cause`` None: its choices ended, or it was cancelled
    or cut by its deadline (``reason`` tells)."""

    key: int
    reason: FinishReason
    cause: EndCause | None
    message: str
    queue_s: float
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int


@dataclass(slots=True)
class StepOutput:
    """New ids as parallel columns: id ``ids[i]`` is number ``indices[i]`` of the answer of choice
    ``choices[i]`` of request ``keys[i]``. ``logprobs`` is by i, ``prompt_logprobs`` by request."""

    step: int = 0
    keys: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ended_choices: list[EndedChoice] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids or self.ended_choices or self.ended or self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Counters:
    """A moment of the scheduler, as pushed to routers and metrics."""

    step: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    running: int
    waiting: int
    pending_prefill_tokens: int
    decode_context_tokens: int
    preemptions: int
    recomputed_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
