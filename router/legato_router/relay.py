"""The life of one request in the router: place, relay, pace, move on when a worker is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2 as pb, worker_pb2

from .attempt import ChoiceEnded, Ended, Lost, PromptLogprobs, Tokens
from .choice_relay import ChoiceRelay
from .credit_window import CreditWindow
from .detokenize import TextStream
from .dispatcher import Dispatcher, Placement
from .served_model import ServedModel
from .server_frames import admitted, finished
from .stop import StopStrings
from .submit_message import Ticket, to_submit
from .timeline import Timeline
from .validated import PreparedRequest

MAX_MOVES = 2
RETRY_AFTER_S = 1.0
_CUT = {
    Reason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    Reason.DEADLINE_EXCEEDED: pb.FINISH_REASON_DEADLINE,
}
"""Ends that leave an answer as it stands, once it has begun."""


class Relay:
    """Owner of a request from admission to its one end. :meth:`frames` is run once; leaving it, by
    whichever way, cancels the request on its worker and gives everything back."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        prepared: PreparedRequest,
        ticket: Ticket,
        timeline: Timeline,
        *,
        eos_token_ids: tuple[int, ...],
        window: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._prepared = prepared
        self._ticket = ticket
        self._timeline = timeline
        request = prepared.request
        eos = () if request.stop.ignore_eos else eos_token_ids
        self._stop_ids = frozenset((*request.stop.token_ids, *eos))
        self._credit = CreditWindow(window, request.initial_credit)
        self._choices = [ChoiceRelay(number, self._text_stream()) for number in range(request.n)]
        self._placement: Placement | None = None
        self._dispatching: asyncio.Task[Placement] | None = None
        self._prompt_logprobs: list[pb.TokenLogprobs] = []
        self._tried: set[str] = set()
        self._cancelled = False
        self._moves = 0
        self._ttft_s = 0.0
        self._queue_s = 0.0

    @property
    def prepared(self) -> PreparedRequest:
        return self._prepared

    @property
    def _is_whole(self) -> bool:
        """Every choice has ended for the client."""
        return all(choice.ended for choice in self._choices)

    # -- from the client -----------------------------------------------------------------------

    def grant(self, tokens: int) -> None:
        self._credit.client_granted(tokens)
        self._pace()

    def cancel(self) -> None:
        """The client's Cancel frame. Its worker ends the request within a step."""
        self._cancelled = True
        if self._placement is not None:
            self._placement.link.cancel(self._placement.attempt)
        elif self._dispatching is not None:
            self._dispatching.cancel()

    # -- to the client -------------------------------------------------------------------------

    async def frames(self) -> AsyncGenerator[pb.ServerFrame, None]:
        """Admitted, deltas, Finished. A frame counts as delivered when the next one is asked for.

        Raises LegatoError for a refusal or failure.
        """
        closing = [delta for delta in self._resume() if delta is not None]
        try:
            if self._is_whole:
                accepted = worker_pb2.Accepted()  # nothing is left to run
                yield admitted(self._prepared, self._ticket, accepted, "")
            else:
                placement = await self._place()
                self._queue_s = self._timeline.elapsed_s()
                worker = placement.link.worker_id
                yield admitted(self._prepared, self._ticket, placement.accepted, worker)
            for delta in closing:
                yield pb.ServerFrame(delta=delta)
            ended = worker_pb2.Ended()
            while self._placement is not None:
                event = await self._placement.attempt.next_event()
                lost: LegatoError | None = None
                match event:
                    case Tokens():
                        async for frame in self._take_tokens(event):
                            yield frame
                    case ChoiceEnded(choice, reason):
                        last = self._choices[choice].end(reason)
                        if last is not None:
                            yield pb.ServerFrame(delta=last)
                    case PromptLogprobs(entries):
                        self._prompt_logprobs.extend(entries)
                    case Ended(ended):
                        self._placement = None
                        if ended.error_reason == Reason.DRAINING:
                            lost = LegatoError(Reason.DRAINING, ended.error_message)
                    case Lost(cause):
                        self._placement = None
                        lost = LegatoError(Reason.WORKER_LOST, cause)
                if lost is not None and not self._is_whole:
                    try:
                        frame = await self._move(lost)
                    except LegatoError as error:
                        if error.reason not in _CUT:
                            raise
                        ended = worker_pb2.Ended(reason=_CUT[error.reason])
                    else:
                        yield frame
            async for frame in self._finish(ended):
                yield frame
        except LegatoError as error:
            self._timeline.add("refused", reason=error.reason.value)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._timeline.add("finished", reason="the client left")
            raise
        finally:
            if self._placement is not None:
                self._placement.link.abandon(self._placement.attempt)

    def _resume(self) -> list[pb.Delta | None]:
        request = self._prepared.request
        if request.resume is None:
            return []
        return [
            choice.resume(
                ids,
                stop_ids=self._stop_ids,
                min_tokens=request.stop.min_tokens,
                max_tokens=self._prepared.max_tokens,
            )
            for choice, ids in zip(self._choices, request.resume.choices, strict=True)
        ]

    async def _place(self) -> Placement:
        remaining_s = self._remaining_s()
        if remaining_s is not None and remaining_s <= 0:
            raise LegatoError(Reason.DEADLINE_EXCEEDED, "the deadline passed before it was placed")
        dispatching = self._dispatching = asyncio.create_task(
            self._dispatcher.dispatch(
                self._model,
                self._prepared,
                self._submit,
                affinity=self._ticket.affinity,
                timeout_s=remaining_s,
                tried=self._tried,
            )
        )
        if self._cancelled:
            dispatching.cancel()
        try:
            placement = self._placement = await dispatching
        except asyncio.CancelledError:
            if dispatching.done() and not dispatching.cancelled() and not dispatching.exception():
                placed = dispatching.result()  # in the very moment in which the caller left
                placed.link.abandon(placed.attempt)
            own = asyncio.current_task()
            if self._cancelled and not (own is not None and own.cancelling()):
                raise LegatoError(Reason.CANCELLED, "cancelled by the client") from None
            raise
        except LegatoError:
            if (self._remaining_s() or 1.0) <= 0:
                message = "the deadline passed before a worker had room"
                raise LegatoError(Reason.DEADLINE_EXCEEDED, message) from None
            raise
        finally:
            self._dispatching = None
        self._timeline.add("accepted", worker=placement.link.worker_id)
        # What the client sent between the Submit and now.
        if self._cancelled:
            placement.link.cancel(placement.attempt)
        self._pace()
        return placement

    async def _move(self, lost: LegatoError) -> pb.ServerFrame:
        """The worker is gone, for the reason ``lost``: the answer goes on from another one, from
        where it stands."""
        self._moves += 1
        cause = lost.message
        if self._moves > MAX_MOVES:
            raise LegatoError(
                Reason.QUARANTINED, f"{self._moves} workers were lost with this request: {cause}"
            )
        from_index = sum(len(choice.ids) for choice in self._choices)
        if not from_index:
            self._prompt_logprobs = []  # computed again, all of them
        self._tried.clear()  # those that had no room then may have some now
        try:
            placement = await self._place()
        except LegatoError as error:
            if error.reason is not Reason.NO_WORKER:
                raise
            message = f"{cause}; {error.message}"
            raise LegatoError(lost.reason, message, retry_after_s=RETRY_AFTER_S) from None
        worker = placement.link.worker_id
        self._timeline.add("moved", cause=cause, worker=worker, tokens=from_index)
        return pb.ServerFrame(moved=pb.Moved(from_index=from_index, cause=cause, worker=worker))

    def _pace(self) -> None:
        """Grants the worker what has become due, if there is one to grant it to."""
        if self._placement is not None and (more := self._credit.due()):
            self._placement.link.grant(self._placement.attempt, more)

    async def _take_tokens(self, tokens: Tokens) -> AsyncGenerator[pb.ServerFrame, None]:
        choice = self._choices[tokens.choice]
        delta = choice.take(tokens)
        if delta is None:
            self._credit.dropped(len(tokens.ids))
            self._pace()
            return
        if choice.ended and self._placement is not None:
            self._placement.link.cancel(self._placement.attempt, choice.choice)
        if self._prompt_logprobs and tokens.choice == 0:
            delta.prompt_logprobs.extend(self._prompt_logprobs)
            self._prompt_logprobs = []
        yield pb.ServerFrame(delta=delta)
        if not self._ttft_s:
            self._ttft_s = self._timeline.elapsed_s()
            self._timeline.add("first_token")
        self._credit.delivered(len(delta.ids))
        self._credit.dropped(len(tokens.ids) - len(delta.ids))
        self._pace()

    async def _finish(self, ended: worker_pb2.Ended) -> AsyncGenerator[pb.ServerFrame, None]:
        if ended.error_reason and not self._is_whole:
            known = ended.error_reason in Reason.__members__
            raise LegatoError(
                Reason(ended.error_reason) if known else Reason.INTERNAL, ended.error_message
            )
        whole = self._choices[0].reason if self._is_whole else ended.reason
        for choice in self._choices:
            delta = choice.end(ended.reason)
            if delta is not None:
                yield pb.ServerFrame(delta=delta)
        self._timeline.add("finished", reason=pb.FinishReason.Name(whole))  # type: ignore[arg-type]
        timings = pb.Timings(
            router_queue_s=self._queue_s,
            ttft_s=self._ttft_s,
            e2e_s=self._timeline.elapsed_s(),
            moves=self._moves,
        )
        yield finished(self._prepared, self._choices, ended, reason=whole, timings=timings)

    # -- messages ------------------------------------------------------------------------------

    def _submit(self) -> worker_pb2.Submit:
        return to_submit(
            self._prepared,
            self._ticket,
            self._choices,
            attempt=self._moves,
            timeout_s=self._remaining_s(),
            initial_credit=self._credit.open(),
        )

    def _remaining_s(self) -> float | None:
        deadline_s = self._ticket.deadline_s
        return None if deadline_s is None else deadline_s - self._timeline.elapsed_s()

    def _text_stream(self) -> TextStream | None:
        request = self._prepared.request
        if request.skip_text:
            return None
        stop = request.stop
        return TextStream(
            self._model.tokenizer.backend,
            self._prepared.prompt_ids,
            StopStrings(stop.strings) if stop.strings else None,
            min_tokens=stop.min_tokens,
            include_stop=stop.include_string,
        )
