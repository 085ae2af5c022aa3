"""Builds a GenerateRequest from keyword arguments, refusing what the wire cannot carry.

Only the form is checked here (a value that no field of the contract can hold); ranges and limits
are the router's, which knows the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from .errors import invalid
from .v1 import inference_pb2 as pb


class GenerateFields(TypedDict, total=False):
    """What a request says besides its text prompt. Every field may be left out (or be None); the
    contract (``legato/v1/inference.proto``) states ranges and defaults.

    Exactly one of the text prompt, ``token_ids`` and ``chat`` is given.
    """

    token_ids: Sequence[int] | None
    chat: Sequence[Mapping[str, str]] | None
    """Messages, each ``{"role": ..., "content": ...}``."""
    skip_generation_prompt: bool
    """With ``chat``: leave out the opening of the assistant's turn."""
    model: str
    max_tokens: int | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    # How tokens are chosen.
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_token_ids: Sequence[int] | None
    seed: int | None
    # When generation ends besides max_tokens.
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    min_tokens: int
    ignore_eos: bool
    include_stop_string: bool
    # Urgency and response times.
    request_class: Literal["interactive", "standard", "batch"] | None
    ttft_s: float | None
    itl_s: float | None
    deadline_s: float | None
    session: str
    cache_salt: str
    initial_credit: int | None
    """Tokens (over all choices) that may come before the first ``grant``; None = unpaced."""
    request_id: str
    skip_text: bool


# Keyword -> place in GenerateRequest. Errors name the place, as the router's own do.
_PLACES: Mapping[str, str] = {
    "token_ids": "token_ids.ids",
    "chat": "chat.messages",
    "skip_generation_prompt": "chat.skip_generation_prompt",
    "model": "model",
    "max_tokens": "max_tokens",
    "n": "n",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "logit_bias": "sampling.logit_bias",
    "allowed_token_ids": "sampling.allowed_token_ids",
    "bad_token_ids": "sampling.bad_token_ids",
    "seed": "sampling.seed",
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "min_tokens": "stop.min_tokens",
    "ignore_eos": "stop.ignore_eos",
    "include_stop_string": "stop.include_string",
    "request_class": "request_class",
    "ttft_s": "objective.ttft_s",
    "itl_s": "objective.itl_s",
    "deadline_s": "objective.deadline_s",
    "session": "session",
    "cache_salt": "cache_salt",
    "initial_credit": "initial_credit",
    "request_id": "request_id",
    "skip_text": "skip_text",
}


def build_request(prompt: str | None, fields: Mapping[str, Any]) -> pb.GenerateRequest:
    """The message for a text ``prompt`` (or None) and the keywords of :class:`GenerateFields`.

    Raises :class:`~legato.errors.LegatoError` INVALID_ARGUMENT, naming the field, for a value that
    the field cannot hold (an id outside uint32, a string for a number), and TypeError for a keyword
    that does not exist.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if unknown := given.keys() - _PLACES.keys():
        raise TypeError(f"unknown request field: {', '.join(sorted(unknown))}")
    if (prompt is not None) + ("token_ids" in given) + ("chat" in given) != 1:
        raise invalid("prompt", "give exactly one of a text prompt, token_ids and chat")
    if "skip_generation_prompt" in given and "chat" not in given:
        raise invalid(_PLACES["skip_generation_prompt"], "goes with chat only")
    request = pb.GenerateRequest()
    if prompt is not None:
        _put(request, "text", prompt)
    if "token_ids" in given:
        request.token_ids.SetInParent()  # an empty list is an empty prompt, not a missing one
    if "chat" in given:
        request.chat.SetInParent()
    for name, value in given.items():
        _put(request, _PLACES[name], value)
    return request


def _put(request: pb.GenerateRequest, place: str, value: Any) -> None:
    *parents, leaf = place.split(".")
    message: Any = request
    for parent in parents:
        message = getattr(message, parent)
    try:
        value = _on_the_wire(place, value)
        if isinstance(value, list):
            getattr(message, leaf).extend(value)
        else:
            setattr(message, leaf, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid(place, str(error)) from error


def _on_the_wire(place: str, value: Any) -> Any:
    """The value in the shape of its field; lists for repeated fields."""
    match place:
        case "stop.strings":
            return [value] if isinstance(value, str) else list(value)
        case "sampling.logit_bias":
            return [pb.LogitBias(token_id=key, bias=bias) for key, bias in value.items()]
        case "chat.messages":
            return [pb.ChatMessage(**message) for message in value]
        case "request_class":
            return pb.RequestClass.Value(f"REQUEST_CLASS_{value.upper()}")
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
