"""A whole answer from its frames, for unary calls."""

from __future__ import annotations

from collections.abc import AsyncIterator

from legato.endpoints import MAX_MESSAGE_BYTES
from legato.errors import invalid
from legato.v1 import inference_pb2 as pb

from .validated import PreparedRequest

MAX_TOKEN_BYTES = 16
"""Id and text of a token, with some room; a logprobs entry comes on top."""


def check_unary_size(prepared: PreparedRequest) -> None:
    """Refuses, before any work is done, an answer that may not fit into one message (fault B101).
    Raises INVALID_ARGUMENT."""
    request = prepared.request
    entry_bytes = 0 if request.logprobs is None else 20 + 9 * request.logprobs
    size = request.n * prepared.max_tokens * (MAX_TOKEN_BYTES + entry_bytes)
    if size > MAX_MESSAGE_BYTES:
        raise invalid(
            "max_tokens",
            f"{request.n} answers of {prepared.max_tokens} tokens may take {size} bytes, and one "
            f"message holds {MAX_MESSAGE_BYTES}; use Generate, or ask for less",
            limit=MAX_MESSAGE_BYTES,
            observed=size,
        )


async def collect(frames: AsyncIterator[pb.ServerFrame]) -> pb.GenerateOnceResponse:
    """Same tokens, text, reasons and usage as the stream gives (faults B061, B062)."""
    response = pb.GenerateOnceResponse()
    choices: dict[int, pb.Choice] = {}
    texts: dict[int, list[str]] = {}
    async for frame in frames:
        match frame.WhichOneof("frame"):
            case "admitted":
                response.admitted.CopyFrom(frame.admitted)
            case "delta":
                delta = frame.delta
                choice = choices.setdefault(delta.choice, pb.Choice(choice=delta.choice))
                choice.ids.extend(delta.ids)
                choice.logprobs.extend(delta.logprobs)
                choice.prompt_logprobs.extend(delta.prompt_logprobs)
                texts.setdefault(delta.choice, []).append(delta.text)
                if delta.finish_reason:
                    choice.finish_reason = delta.finish_reason
                    choice.stop_string = delta.stop_string
            case "finished":
                response.finished.CopyFrom(frame.finished)
    for number, choice in sorted(choices.items()):
        choice.text = "".join(texts[number])
        response.choices.append(choice)
    return response
