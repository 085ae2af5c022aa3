"""What an answer is to the client, and what of it has been received so far. Pure: no gRPC here.

Where the client adds something (joins frames and calls into one sequence), it has dataclasses of
its own: Delta, Choice, Answer. Messages that it only hands through (Admitted, Usage, Timings,
TokenLogprobs, Model, PlanResponse, ExplainResponse) stay the protobuf messages that they are: a
copy would say the same again, and hide fields that a newer router adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from .errors import LegatoError, Reason
from .v1 import inference_pb2 as pb


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"  # the model's end-of-sequence id or a stop id
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    OTHER = "other"  # a reason that this version of the client does not know


_REASONS: dict[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    pb.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
}


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice. Deltas of a choice are contiguous, across reconnects too:
    ``start_index`` is the number of its ids that came before, and texts simply concatenate.

    ``text`` is what became final with these ids and may lag them. ``logprobs`` has one entry per
    id, if asked for; ``prompt_logprobs`` one per prompt token but the first, on the first delta of
    choice 0. ``finish_reason`` is set on the last delta of the choice.
    """

    choice: int
    start_index: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[pb.TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the ``n`` continuations, whole. ``stop_string`` is the one that matched, if any."""

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str = ""
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[pb.TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. ``finish_reason`` is that of choice 0, or CANCELLED or DEADLINE when the
    request as a whole was ended. ``admitted`` tells the request's key, worker and seed."""

    choices: tuple[Choice, ...]
    finish_reason: FinishReason
    admitted: pb.Admitted
    usage: pb.Usage
    timings: pb.Timings

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return self.choices[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of choice 0."""
        return self.choices[0].ids


class Received:
    """The ids received so far of one answer, over all its calls: the single place where order is
    checked and duplicates are dropped, and what a resume tells the router."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._ids: dict[int, list[int]] = {}
        self._ended: set[int] = set()
        self.num_tokens = 0

    def accept(self, frame: pb.Delta) -> Delta | None:
        """The part of ``frame`` that is new; None when nothing is.

        Ids already held are dropped, and their text with them when no id of the frame is new. The
        text of a frame that brings new ids is taken as it is: by the contract the router continues
        text where it stopped. Raises INTERNAL on a gap, on ids that contradict those held, on ids
        after the choice's end and on a choice that was not asked for.
        """
        if frame.choice >= self._n:
            raise _breach(f"delta for choice {frame.choice} of {self._n}")
        held = self._ids.setdefault(frame.choice, [])
        overlap = len(held) - frame.start_index
        if overlap < 0:
            raise _breach(
                f"gap in choice {frame.choice}: {len(held)} ids held, next starts at "
                f"{frame.start_index}"
            )
        repeated = frame.ids[:overlap]
        if held[frame.start_index : frame.start_index + len(repeated)] != list(repeated):
            raise _breach(f"choice {frame.choice} repeats other ids than were sent before")
        ids = tuple(frame.ids[overlap:])
        reason = finish_reason(frame.finish_reason)
        if frame.choice in self._ended:
            if ids:
                raise _breach(f"ids after the end of choice {frame.choice}")
            return None
        if overlap > 0 and not ids and reason is None:
            return None
        start_index = len(held)
        held.extend(ids)
        self.num_tokens += len(ids)
        if reason is not None:
            self._ended.add(frame.choice)
        return Delta(
            choice=frame.choice,
            start_index=start_index,
            ids=ids,
            text=frame.text,
            logprobs=tuple(frame.logprobs[overlap:]),
            prompt_logprobs=() if start_index else tuple(frame.prompt_logprobs),
            finish_reason=reason,
            stop_string=frame.stop_string,
        )

    def resume(self, resume_token: bytes) -> pb.Resume:
        """What the router needs to continue after the ids held."""
        choices = [pb.ChoiceTokens(choice=key, ids=ids) for key, ids in self._ids.items() if ids]
        return pb.Resume(resume_token=resume_token, choices=choices)


def finish_reason(value: int) -> FinishReason | None:
    """None for "not ended"."""
    return _REASONS.get(value, FinishReason.OTHER)


def assemble(
    deltas: Iterable[Delta], *, n: int, admitted: pb.Admitted, finished: pb.Finished
) -> Answer:
    """The whole answer from all its deltas. A choice that the end of the request cut short has the
    request's reason."""
    reason = finish_reason(finished.reason) or FinishReason.OTHER
    by_choice: list[list[Delta]] = [[] for _ in range(n)]
    for delta in deltas:
        by_choice[delta.choice].append(delta)
    return Answer(
        choices=tuple(_choice(parts, reason) for parts in by_choice),
        finish_reason=reason,
        admitted=admitted,
        usage=finished.usage,
        timings=finished.timings,
    )


def _choice(parts: list[Delta], cut_short: FinishReason) -> Choice:
    return Choice(
        text="".join(part.text for part in parts),
        ids=tuple(token for part in parts for token in part.ids),
        finish_reason=(parts[-1].finish_reason if parts else None) or cut_short,
        stop_string=parts[-1].stop_string if parts else "",
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
    )


def _breach(what: str) -> LegatoError:
    return LegatoError(Reason.INTERNAL, f"the router broke the stream's contract: {what}")
