"""The one gate for what clients send: every field of a request against what inference.proto states.

Two steps, cheap to dear: :func:`validate` needs no tokenization; :func:`check_prompt` needs the
prompt's ids. Every comparison is written so that NaN fails it. Errors are
:func:`legato.errors.invalid`, naming the field, its limit and what was sent. What the worker checks
again is in :mod:`legato.sampling_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from legato.capacity import blocks_needed, max_tokens_that_fit
from legato.errors import LegatoError, Reason, invalid
from legato.sampling_rules import (
    check_count,
    check_ids,
    check_range,
    check_something_left,
    checked_id_list,
    resolve_sampling,
)
from legato.v1 import inference_pb2 as pb

from .validated import (
    ChatPrompt,
    IdsPrompt,
    Message,
    ModelLimits,
    Objective,
    PreparedRequest,
    Prompt,
    RequestClass,
    Resume,
    Stop,
    TextPrompt,
    ValidatedRequest,
)

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS_BYTES = 3 << 20
"""Prompt log probabilities travel in one frame, which must stay below gRPC's default of 4 MiB."""
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_SESSION_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_REQUEST_ID_BYTES = 128
MAX_RESUME_TOKEN_BYTES = 1024

ROLES = ("system", "user", "assistant")


def validate(request: pb.GenerateRequest, model: ModelLimits) -> ValidatedRequest:
    """The request with every field in range. Raises INVALID_ARGUMENT otherwise.

    ``request.model`` is passed on as it is.
    """
    n = request.n if request.HasField("n") else 1
    check_range("n", n, 1, model.max_n)
    max_tokens = request.max_tokens if request.HasField("max_tokens") else None
    if max_tokens is not None:
        check_range("max_tokens", max_tokens, 1, model.max_model_len - 1)
    _check_bytes("session", request.session, MAX_SESSION_BYTES)
    _check_bytes("cache_salt", request.cache_salt, MAX_CACHE_SALT_BYTES)
    _check_bytes("request_id", request.request_id, MAX_REQUEST_ID_BYTES)
    stop = _stop(request.stop, model.max_model_len - 1 if max_tokens is None else max_tokens, model)
    if request.skip_text and stop.strings:
        raise invalid("stop.strings", "stop strings need text, and skip_text is set")
    sampling = resolve_sampling(request.sampling, model.vocab_size)
    check_something_left(
        sampling,
        ending_ids=(*stop.token_ids, *(() if stop.ignore_eos else model.eos_token_ids)),
        min_tokens=stop.min_tokens,
        vocab_size=model.vocab_size,
    )
    return ValidatedRequest(
        model=request.model,
        prompt=_prompt(request, model),
        max_tokens=max_tokens,
        n=n,
        sampling=sampling,
        stop=stop,
        logprobs=_logprobs(request, "logprobs", model),
        prompt_logprobs=_logprobs(request, "prompt_logprobs", model),
        request_class=_request_class(request.request_class),
        objective=_objective(request.objective),
        session=request.session,
        cache_salt=request.cache_salt,
        initial_credit=request.initial_credit if request.HasField("initial_credit") else None,
        resume=_resume(request.resume, n, model) if request.HasField("resume") else None,
        request_id=request.request_id,
        skip_text=request.skip_text,
    )


def check_prompt(
    request: ValidatedRequest, prompt_ids: Sequence[int], model: ModelLimits
) -> PreparedRequest:
    """The request with its prompt's ids and ``max_tokens`` in force.

    An unset ``max_tokens`` becomes what the model's length and a worker's KV cache leave. Raises
    INVALID_ARGUMENT, or NEVER_FITS when no worker could hold the request even alone.
    """
    field = _prompt_field(request.prompt)
    num_prompt = len(prompt_ids)
    _check_length(field, num_prompt, model)
    if not isinstance(request.prompt, IdsPrompt):  # a tokenizer can know more ids than the model
        check_ids(field, prompt_ids, model.vocab_size)
    if request.prompt_logprobs is not None:
        _check_prompt_logprobs(num_prompt, request.prompt_logprobs)

    room = model.max_model_len - num_prompt
    max_tokens = request.max_tokens
    if max_tokens is None:
        fitting = max_tokens_that_fit(num_prompt, request.n, model.block_size, model.num_blocks)
        max_tokens = max(1, min(room, fitting))
    elif not max_tokens <= room:
        raise invalid(
            "max_tokens",
            f"{max_tokens} tokens do not fit behind a prompt of {num_prompt}: the model takes "
            f"{model.max_model_len} in all, which leaves {room}",
            limit=room,
            observed=max_tokens,
        )
    needed = blocks_needed(num_prompt, max_tokens, request.n, model.block_size)
    if not needed <= model.num_blocks:
        raise LegatoError(
            Reason.NEVER_FITS,
            f"a prompt of {num_prompt} tokens with max_tokens {max_tokens} and n {request.n} needs "
            f"{needed} KV blocks of {model.block_size} tokens; a whole worker has "
            f"{model.num_blocks}",
            metadata={"limit": str(model.num_blocks), "observed": str(needed)},
        )
    check_range("stop.min_tokens", request.stop.min_tokens, 0, max_tokens)
    for ids in request.resume.choices if request.resume else ():
        check_count("resume.choices", len(ids), max_tokens)
    return PreparedRequest(request, tuple(prompt_ids), max_tokens, needed)


def _prompt(request: pb.GenerateRequest, model: ModelLimits) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise invalid("text", "the prompt is empty", limit=1, observed=0)
            _check_bytes("text", request.text, model.max_text_bytes)
            return TextPrompt(request.text)
        case "token_ids":
            _check_length("token_ids", len(request.token_ids.ids), model)  # before it is copied
            ids = tuple(request.token_ids.ids)
            check_ids("token_ids", ids, model.vocab_size)
            return IdsPrompt(ids)
        case "chat":
            return _chat(request.chat, model)
        case _:
            raise invalid("prompt", "one of text, token_ids and chat must be set")


def _chat(chat: pb.Chat, model: ModelLimits) -> ChatPrompt:
    check_range("chat.messages", len(chat.messages), 1, MAX_MESSAGES, "number of messages")
    for message in chat.messages:
        if message.role not in ROLES:
            raise invalid(
                "chat.messages.role",
                f"must be one of {', '.join(ROLES)}",
                limit="|".join(ROLES),
                observed=message.role[:32],
            )
    messages = tuple(Message(message.role, message.content) for message in chat.messages)
    _check_bytes("chat", "".join(message.content for message in messages), model.max_text_bytes)
    return ChatPrompt(messages, chat.skip_generation_prompt)


def _prompt_field(prompt: Prompt) -> str:
    match prompt:
        case TextPrompt():
            return "text"
        case IdsPrompt():
            return "token_ids"
        case ChatPrompt():
            return "chat"


def _stop(stop: pb.Stop, max_tokens: int, model: ModelLimits) -> Stop:
    check_count("stop.strings", len(stop.strings), MAX_STOP_STRINGS)
    for string in stop.strings:
        if not string:
            raise invalid("stop.strings", "a stop string is empty", limit=1, observed=0)
        _check_bytes("stop.strings", string, MAX_STOP_STRING_BYTES)
    check_range("stop.min_tokens", stop.min_tokens, 0, max_tokens)
    return Stop(
        strings=tuple(stop.strings),
        token_ids=checked_id_list(
            "stop.token_ids", stop.token_ids, MAX_STOP_TOKEN_IDS, model.vocab_size
        ),
        min_tokens=stop.min_tokens,
        ignore_eos=stop.ignore_eos,
        include_string=stop.include_string,
    )


def _objective(objective: pb.Objective) -> Objective:
    def seconds(name: str) -> float | None:
        if not objective.HasField(name):  # type: ignore[arg-type]
            return None
        value: float = getattr(objective, name)
        if not (value > 0 and isfinite(value)):
            raise invalid(f"objective.{name}", "must be finite and > 0", limit=0, observed=value)
        return value

    return Objective(seconds("ttft_s"), seconds("itl_s"), seconds("deadline_s"))


def _resume(resume: pb.Resume, n: int, model: ModelLimits) -> Resume:
    field = "resume.choices"
    size = len(resume.resume_token)
    check_range("resume.resume_token", size, 1, MAX_RESUME_TOKEN_BYTES, "size in bytes")
    check_count(field, len(resume.choices), n)
    choices: dict[int, tuple[int, ...]] = {}
    for held in resume.choices:
        check_range(field, held.choice, 0, n - 1, "choice")
        if held.choice in choices:
            raise invalid(field, f"choice {held.choice} is named twice", observed=held.choice)
        check_count(field, len(held.ids), model.max_model_len - 1)
        check_ids(field, held.ids, model.vocab_size)
        choices[held.choice] = tuple(held.ids)
    return Resume(resume.resume_token, tuple(choices.get(choice, ()) for choice in range(n)))


def _request_class(value: int) -> RequestClass:
    if value == pb.REQUEST_CLASS_UNSPECIFIED:
        return RequestClass.STANDARD
    try:
        return RequestClass(value)
    except ValueError:
        raise invalid("request_class", "not a known class", observed=value) from None


def _logprobs(request: pb.GenerateRequest, field: str, model: ModelLimits) -> int | None:
    if not request.HasField(field):  # type: ignore[arg-type]
        return None
    value: int = getattr(request, field)
    check_range(field, value, 0, MAX_LOGPROBS)
    return min(value, model.vocab_size)


def _check_prompt_logprobs(num_prompt: int, num_top: int) -> None:
    # Most that protobuf takes for one TokenLogprobs: tag and length, logprob, rank, packed arrays.
    entry_bytes = 20 + num_top * (5 + 4)
    size = (num_prompt - 1) * entry_bytes
    if not size <= MAX_PROMPT_LOGPROBS_BYTES:
        raise invalid(
            "prompt_logprobs",
            f"log probabilities of {num_prompt} prompt tokens would take up to {size} bytes",
            limit=MAX_PROMPT_LOGPROBS_BYTES,
            observed=size,
        )


def _check_length(field: str, num_prompt: int, model: ModelLimits) -> None:
    if not num_prompt:
        raise invalid(field, "the prompt is empty", limit=1, observed=0)
    limit = model.max_model_len - 1
    if not num_prompt <= limit:
        raise invalid(
            field,
            f"the prompt has {num_prompt} tokens; the model takes {model.max_model_len} in all, of "
            "which at least one is generated",
            limit=limit,
            observed=num_prompt,
        )


def _check_bytes(field: str, text: str, limit: int) -> None:
    # A text has at least as many bytes as characters, so a huge one is not encoded to be measured.
    size = len(text) if len(text) > limit else len(text.encode())
    if not size <= limit:
        raise invalid(field, f"at most {limit} bytes, not {size}", limit=limit, observed=size)
