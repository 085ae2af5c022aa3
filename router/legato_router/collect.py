"""A whole answer from its frames, for unary calls."""

from __future__ import annotations

from collections.abc import AsyncIterator

from legato.v1 import inference_pb2 as pb


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
