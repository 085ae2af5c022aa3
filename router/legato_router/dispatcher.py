"""Finds a worker for a request and submits it there: placement, queue, and what a Nack leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from legato.capacity import blocks_needed
from legato.errors import LegatoError, Reason
from legato.v1 import worker_pb2 as pb

from .attempt import Accepted, Attempt, Lost, Refused
from .placement import Candidate, choose, cold_rate, score_s
from .served_model import ServedModel, workers_of
from .validated import PreparedRequest
from .waiting_room import Placed, WaitingRoom
from .worker_link import WorkerLink
from .worker_view import Load, WorkerView

MAX_REPICKS = 2
MAX_BACKLOG = 8
"""Requests beyond its seats that a worker is given; more wait in the router, where they can still
go elsewhere."""
USUAL_TOKENS = 256
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Placement:
    """A request that a worker has accepted."""

    link: WorkerLink
    attempt: Attempt
    accepted: pb.Accepted


class Dispatcher:
    """Places requests on the links it is given. Holds no state of requests."""

    def __init__(self, links: list[WorkerLink], room: WaitingRoom, max_queue_s: float) -> None:
        self._links = links
        self._room = room
        self._max_queue_s = max_queue_s

    async def dispatch(
        self,
        model: ServedModel,
        prepared: PreparedRequest,
        make_submit: Callable[[], pb.Submit],
        *,
        affinity: bytes,
        timeout_s: float | None,
        tried: set[str],
    ) -> Placement:
        """Returns once a worker has accepted the request. Workers named in ``tried`` are left out,
        and those that refuse or fail here are added to it (fault B085); one that is only full is
        not: it can be chosen again when it has sent newer numbers.

        Raises the refusal: NO_WORKER, QUEUE_FULL, QUEUE_TIMEOUT, or a worker's own.
        """
        load = _load(prepared)
        max_wait_s = self._max_queue_s if timeout_s is None else min(self._max_queue_s, timeout_s)
        now = asyncio.get_running_loop().time
        end, arrival = now() + max_wait_s, self._room.arrival()
        refusal: LegatoError | None = None
        num_picks = 0
        while num_picks <= MAX_REPICKS:

            def place() -> Placed | None:
                link = self._pick(model, prepared, load, affinity, tried)
                return None if link is None else (link, link.submit(make_submit(), load))

            try:
                link, attempt = await self._room.place(
                    place,
                    num_tokens=load.prompt_tokens,
                    request_class=prepared.request.request_class,
                    arrival=arrival,
                    timeout_s=end - now(),
                )
            except LegatoError as error:
                raise refusal or error from None
            try:
                event = await attempt.next_event()
            except BaseException:
                link.abandon(attempt)
                raise
            match event:
                case Accepted(frame):
                    return Placement(link, attempt, frame)
                case Refused(nack) if nack.reason == Reason.QUEUE_FULL:
                    continue  # another one, or wait in the room: here is room no sooner than told
                case Refused(nack):
                    refusal = _refusal(nack)
                    if refusal.reason in (Reason.INVALID_ARGUMENT, Reason.NEVER_FITS):
                        raise refusal
                case Lost(cause):
                    refusal = LegatoError(Reason.NO_WORKER, cause, retry_after_s=RETRY_AFTER_S)
                case other:
                    link.abandon(attempt)
                    raise LegatoError(Reason.INTERNAL, f"a worker answered with {other!r}")
            tried.add(attempt.worker)
            num_picks += 1
        assert refusal is not None
        raise refusal

    def ranked(
        self, model: ServedModel, prepared: PreparedRequest
    ) -> list[tuple[float, WorkerLink]]:
        """Workers that could take the request now, best first, with their scores in seconds."""
        load = _load(prepared)
        open_links = [
            (link, link.view)
            for link in workers_of(model, self._links)
            if link.view is not None
            and not link.draining
            and _fits(link, prepared)
            and _has_room(link.view)
        ]
        cold = cold_rate(view for _, view in open_links)
        scored = [(score_s(view, load, cold), link) for link, view in open_links]
        return sorted(scored, key=lambda entry: entry[0])

    def _pick(
        self,
        model: ServedModel,
        prepared: PreparedRequest,
        load: Load,
        affinity: bytes,
        tried: set[str],
    ) -> WorkerLink | None:
        """The best worker with room; None = wait. Raises when no worker could come to have room."""
        by_name = {
            link.worker_id: link
            for link in workers_of(model, self._links)
            if not link.draining and link.worker_id not in tried and _fits(link, prepared)
        }
        if not by_name:
            raise LegatoError(
                Reason.NO_WORKER,
                f"no worker serves {model.name!r} now",
                retry_after_s=RETRY_AFTER_S,
            )
        candidates = [
            Candidate(name, link.view)
            for name, link in by_name.items()
            if link.view is not None and _has_room(link.view)
        ]
        chosen = choose(candidates, load, affinity)
        return None if chosen is None else by_name[chosen.name]


def _fits(link: WorkerLink, prepared: PreparedRequest) -> bool:
    """Whether the worker could hold the request if it had nothing else to do."""
    if link.view is None:
        return False
    spec, num_prompt = link.view.model, len(prepared.prompt_ids)
    needed = blocks_needed(num_prompt, prepared.max_tokens, prepared.request.n, spec.block_size)
    return needed <= spec.num_blocks and num_prompt + prepared.max_tokens <= spec.max_model_len


def _has_room(view: WorkerView) -> bool:
    return not view.full and view.num_waiting < MAX_BACKLOG


def _load(prepared: PreparedRequest) -> Load:
    """Few answers reach a large max_tokens, so placement counts a usual length instead."""
    share = (len(prepared.prompt_ids) + min(prepared.max_tokens, USUAL_TOKENS)) / (
        len(prepared.prompt_ids) + prepared.max_tokens
    )
    return Load(ceil(prepared.blocks_needed * share), len(prepared.prompt_ids))


def _refusal(nack: pb.Nack) -> LegatoError:
    known = nack.reason in Reason.__members__
    return LegatoError(
        Reason(nack.reason) if known else Reason.INTERNAL,
        nack.message,
        nack.field,
        retry_after_s=nack.retry_after_s or None,
    )
