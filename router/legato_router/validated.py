"""A request as the router works with it: frozen, in range, independent of the wire format.

Made by :mod:`legato_router.validate` only, so whoever holds one need not check it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from legato.sampling_rules import Sampling

MAX_BYTES_PER_TOKEN = 16
"""Prose, code and CJK take 2 to 6 bytes a token, so a text of more than 16 times the model's length
in bytes can only fit if it is mostly blanks; it is refused before any work is spent on it."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model and the workers that serve it can take. ``vocab_size`` counts the rows of the
    embedding table; ``num_blocks`` are those of the largest worker that requests can use."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    max_n: int = 16

    @property
    def max_text_bytes(self) -> int:
        """No prompt of more bytes is tokenized to learn that it is too long."""
        return self.max_model_len * MAX_BYTES_PER_TOKEN


class RequestClass(IntEnum):
    """Urgency of a request; lower is more urgent. Values equal those of the wire contract."""

    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Every id is below the model's vocab_size."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """At least one message; roles are known ones."""

    messages: tuple[Message, ...]
    skip_generation_prompt: bool = False


Prompt = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Stop:
    """When an answer ends besides max_tokens."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    include_string: bool = False


@dataclass(frozen=True, slots=True)
class Objective:
    """Wished response times in seconds, finite and > 0; None = that of the request's class."""

    ttft_s: float | None = None
    itl_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """An answer to continue: the client's token, not yet verified, and the ids that it holds of
    each of the n choices."""

    token: bytes
    choices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request whose every field is in its stated range. What depends on the length of the prompt
    is checked by :func:`legato_router.validate.check_prompt`.

    ``max_tokens``: None = up to the model's limit. ``logprobs`` and ``prompt_logprobs``: None =
    none, k >= 0 = the token itself and the k most likely ones. ``initial_credit``: None = the
    router paces itself.
    """

    model: str
    prompt: Prompt
    max_tokens: int | None = None
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop = field(default_factory=Stop)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    request_class: RequestClass = RequestClass.STANDARD
    objective: Objective = field(default_factory=Objective)
    session: str = ""
    cache_salt: str = ""
    initial_credit: int | None = None
    resume: Resume | None = None
    request_id: str = ""
    skip_text: bool = False


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that some worker of its model can serve: prompt as ids, ``max_tokens`` resolved,
    and the KV blocks that it may come to need."""

    request: ValidatedRequest
    prompt_ids: tuple[int, ...]
    max_tokens: int
    blocks_needed: int
