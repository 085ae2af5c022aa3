"""What a worker is asked to do: plain, frozen data, already validated and resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class RequestClass(IntEnum):
    """Urgency of a request; lower is more urgent."""

    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3


class FinishReason(IntEnum):
    """Why a choice ended. Values equal those of the wire contract."""

    STOP = 1
    STOP_STRING = 2
    LENGTH = 3
    CANCELLED = 4
    DEADLINE = 5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request chooses its tokens. Every field is resolved and in range.

    ``temperature == 0`` is greedy. ``top_k == 0`` means all. ``logprobs``: None = none, k >= 0 =
    the chosen token and the k most likely ones. Random numbers are a function of
    ``(seed, choice, position)``, see :mod:`legato_worker.sampling`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """An answer to continue: the ids delivered so far; ``finished`` ones are not continued."""

    ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the scheduler takes it.

    ``key`` is made by the worker's service and unique for the life of the worker; nothing chosen
    by a client is ever a key. ``block_hashes`` are the chained hashes of the prompt's full blocks
    (:mod:`legato.block_hash`), salted by tenant and cache salt. Times are seconds on the engine's
    clock. ``stop_token_ids`` holds the model's end-of-sequence ids too unless they are ignored.
    ``credit`` is the number of tokens, over all choices, that may be delivered before a grant.
    """

    key: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    n: int = 1
    sampling: SamplingParams = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    request_class: RequestClass = RequestClass.STANDARD
    arrival_s: float = 0.0
    deadline_s: float | None = None
    block_hashes: tuple[bytes, ...] = ()
    cache_root: bytes = b""
    tenant: str = ""
    credit: int = 1 << 31
    resume: tuple[ResumedChoice, ...] = field(default=())
