"""One choice of an answer on its way through the router: ids in, deltas out."""

from __future__ import annotations

from collections.abc import Sequence

from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2 as pb

from .attempt import Tokens
from .detokenize import TextStream


class ChoiceRelay:
    """Owner of a choice's delivered ids and of its text. ``stream`` None: ids only.

    ``reason`` is set once the choice has ended for the client, whatever its worker still does.
    """

    __slots__ = ("_stream", "choice", "ids", "reason")

    def __init__(self, choice: int, stream: TextStream | None) -> None:
        self.choice = choice
        self.ids: list[int] = []
        self.reason: int = pb.FINISH_REASON_UNSPECIFIED
        self._stream = stream

    @property
    def ended(self) -> bool:
        return self.reason != pb.FINISH_REASON_UNSPECIFIED

    def resume(
        self, ids: Sequence[int], *, stop_ids: frozenset[int], min_tokens: int, max_tokens: int
    ) -> pb.Delta | None:
        """Takes ids that the client holds already. Returns the closing delta when they were all
        there is: the client may have missed it."""
        self.ids += ids
        stopped = self._stream.replay(ids) if self._stream is not None else None
        if stopped is not None:
            return self._close(pb.FINISH_REASON_STOP_STRING, stopped)
        if ids and ids[-1] in stop_ids and len(ids) >= min_tokens:
            return self.end(pb.FINISH_REASON_STOP)
        if len(ids) >= max_tokens:
            return self.end(pb.FINISH_REASON_LENGTH)
        return None

    def take(self, tokens: Tokens) -> pb.Delta | None:
        """New ids from a worker. Ids that were delivered before are dropped; a gap is an error."""
        if self.ended:
            return None
        known = len(self.ids) - tokens.start_index
        if known < 0:
            raise LegatoError(
                Reason.INTERNAL,
                f"a worker sent token {tokens.start_index} of choice {self.choice} after "
                f"{len(self.ids)} tokens",
            )
        ids = tokens.ids[known:]
        if not ids:
            return None
        delta = pb.Delta(choice=self.choice, start_index=len(self.ids))
        logprobs = tokens.logprobs[known:]
        if self._stream is not None:
            text, count, stop = self._stream.push(ids)
            delta.text = text
            if stop is not None:
                ids, logprobs = ids[:count], logprobs[:count]
                self.reason = pb.FINISH_REASON_STOP_STRING
                delta.finish_reason = pb.FINISH_REASON_STOP_STRING
                delta.stop_string = stop
        self.ids += ids
        delta.ids.extend(ids)
        if logprobs:
            delta.logprobs.extend(logprobs)
        return delta

    def end(self, reason: int) -> pb.Delta | None:
        """The choice ends: what was held back as a possible stop string comes out (fault B052)."""
        return None if self.ended else self._close(reason)

    def _close(self, reason: int, stop_string: str = "") -> pb.Delta:
        self.reason = reason
        text = self._stream.finish() if self._stream is not None else ""
        return pb.Delta(
            choice=self.choice,
            start_index=len(self.ids),
            text=text,
            finish_reason=reason,  # type: ignore[arg-type]
            stop_string=stop_string,
        )
