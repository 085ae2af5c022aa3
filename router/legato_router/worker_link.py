"""The one stream between this router and a worker, kept up for as long as the router runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import grpc
import structlog
from legato.endpoints import CHANNEL_OPTIONS
from legato.errors import Reason
from legato.v1 import inference_pb2, worker_pb2 as pb, worker_pb2_grpc

from .attempt import Accepted, Attempt, ChoiceEnded, Ended, Lost, PromptLogprobs, Refused, Tokens
from .worker_view import Load, WorkerView

PROTOCOL_VERSION = 1
MAX_IDS_PER_FRAME = 16_384
HEARTBEAT_S = 1.0
MAX_SILENCE_S = 3.0
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
log = structlog.get_logger("legato.router.link")


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    router_id: str
    incarnation: str


class WorkerLink:
    """Connects, reconnects with jittered backoff, and hands frames to the attempts they are for.

    ``view`` is None while the worker is not attached. ``changed`` is called after each change that
    can matter to a placement. Belongs to one event loop.
    """

    def __init__(
        self,
        address: str,
        identity: RouterIdentity,
        *,
        changed: Callable[[], None],
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        self.address = address
        self.worker_id = address
        self.view: WorkerView | None = None
        self.draining = False
        self._identity = identity
        self._changed = changed
        self._clock = clock
        self._random = random
        self._attempts: dict[int, Attempt] = {}
        self._outgoing: deque[pb.RouterFrame] = deque()
        self._ready = asyncio.Event()
        self._next_rid = 1
        self._next_seq = 1
        self._heard_s = 0.0

    @property
    def num_attempts(self) -> int:
        """Requests of this router on this worker."""
        return len(self._attempts)

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        backoff_s, last_cause = MIN_BACKOFF_S, ""
        while True:
            async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                cause = await self._attach(worker_pb2_grpc.WorkerStub(channel))
            attached = self.view is not None
            self._lose(cause)
            if attached:
                log.warning("worker lost", worker=self.worker_id, cause=cause)
                backoff_s = MIN_BACKOFF_S
            elif cause != last_cause:
                log.warning("worker not attached", address=self.address, cause=cause)
            last_cause = cause
            await asyncio.sleep(backoff_s * self._random.uniform(0.5, 1.0))
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    def submit(self, submit: pb.Submit, load: Load) -> Attempt:
        """Sends a request; its ``rid`` and ``seq`` are filled in here. The link is attached."""
        assert self.view is not None
        attempt = Attempt(self._next_rid, self._next_seq, self.worker_id)
        self._next_rid += 1
        self._next_seq += 1
        submit.rid, submit.seq = attempt.rid, attempt.seq
        self._attempts[attempt.rid] = attempt
        self.view.submitted(attempt.seq, load)
        for frame in _split(submit):
            self._send(frame)
        return attempt

    def cancel(self, attempt: Attempt, choice: int | None = None) -> None:
        """Ends a request on the worker, or one choice of it. Does nothing once it has ended."""
        if attempt.rid in self._attempts:
            self._send(pb.RouterFrame(cancel=pb.CancelRequest(rid=attempt.rid, choice=choice)))

    def grant(self, attempt: Attempt, tokens: int) -> None:
        if attempt.rid in self._attempts:
            self._send(pb.RouterFrame(credit=pb.GrantCredit(rid=attempt.rid, tokens=tokens)))

    def abandon(self, attempt: Attempt) -> None:
        """Nobody waits for this attempt any more: it is cancelled and forgotten."""
        self.cancel(attempt)
        self._forget(attempt)

    async def _attach(self, stub: worker_pb2_grpc.WorkerStub) -> str:
        """One stream, until it ends; returns why it ended."""
        call = stub.Attach()
        self._outgoing.clear()
        hello = pb.Hello(
            router_id=self._identity.router_id,
            incarnation=self._identity.incarnation,
            protocol_version=PROTOCOL_VERSION,
        )
        self._send(pb.RouterFrame(hello=hello))
        writer = asyncio.create_task(self._write(call))
        watch = asyncio.create_task(self._until_silent())
        for task in (writer, watch):
            task.add_done_callback(lambda _: call.cancel())
        try:
            async for frame in call:
                self._heard_s = self._clock()
                self._handle(frame)
            return "the worker closed the link"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            # Of the call, by one of its tasks, or of this task from outside?
            own = asyncio.current_task()
            if (own is not None and own.cancelling()) or not (watch.done() or writer.done()):
                raise
            silent = f"nothing was heard for {MAX_SILENCE_S:g} s"
            return silent if watch.done() else "the link could not be written"
        except Exception as error:  # a frame that makes no sense ends this link, not the router
            log.exception("a worker's frame could not be taken", worker=self.worker_id)
            return f"{type(error).__name__}: {error}"
        finally:
            call.cancel()
            for task in (writer, watch):
                task.cancel()
            await asyncio.gather(writer, watch, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.RouterFrame, pb.WorkerFrame]) -> None:
        while True:
            while self._outgoing:
                await call.write(self._outgoing.popleft())
            self._ready.clear()
            await self._ready.wait()

    async def _until_silent(self) -> None:
        """Pings, and returns when the worker has answered nothing for ``MAX_SILENCE_S``: it is
        lost, connection or not. Time in which this very loop did not run does not count."""
        number = 0
        self._heard_s = asked_s = self._clock()
        while self._clock() - self._heard_s <= MAX_SILENCE_S:
            number += 1
            self._send(pb.RouterFrame(ping=pb.Ping(id=number)))
            await asyncio.sleep(HEARTBEAT_S)
            now = self._clock()
            self._heard_s = min(now, self._heard_s + max(0.0, now - asked_s - HEARTBEAT_S))
            asked_s = now

    def _send(self, frame: pb.RouterFrame) -> None:
        self._outgoing.append(frame)
        self._ready.set()

    def _handle(self, frame: pb.WorkerFrame) -> None:
        match frame.WhichOneof("frame"):
            case "step":
                self._take_step(frame.step)
            case "snapshot":
                self._update(frame.snapshot)
            case "accepted":
                attempt = self._attempts.get(frame.accepted.rid)
                if attempt is not None:
                    attempt.put(Accepted(frame.accepted))
            case "nack":
                attempt = self._attempts.get(frame.nack.rid)
                if attempt is not None:
                    self._forget(attempt)
                    attempt.put(Refused(frame.nack))
                self._update(frame.nack.snapshot, full=frame.nack.reason == Reason.QUEUE_FULL)
            case "welcome":
                welcome = frame.welcome
                self.worker_id = welcome.worker_id
                self.view = WorkerView(welcome.model, welcome.snapshot)
                self.draining = welcome.snapshot.draining
                log.info("worker attached", worker=self.worker_id, address=self.address)
                self._changed()
            case "draining":
                self.draining = True
                self._changed()
            case _:
                pass  # pong, or a frame of a newer worker

    def _take_step(self, step: pb.Step) -> None:
        """Hands each row to its attempt, in the order in which the worker gave them."""
        logprobs: dict[tuple[int, int], inference_pb2.TokenLogprobs] = {}
        for entry in step.logprobs:
            if entry.prompt_tokens and entry.rid in self._attempts:
                self._attempts[entry.rid].put(PromptLogprobs(entry.prompt_tokens))
            for tokens in entry.tokens:
                logprobs[entry.rid, entry.choice] = tokens
        ids, offset = step.ids, 0
        attempts = self._attempts
        for rid, choice, start, count in zip(
            step.rids, step.choices, step.start_indices, step.num_ids, strict=True
        ):
            row = list(ids[offset : offset + count])
            offset += count
            attempt = attempts.get(rid)
            if attempt is not None:
                own = logprobs.get((rid, choice)) if logprobs else None
                attempt.put(Tokens(choice, start, row, [] if own is None else [own]))
        for ended in step.ended_choices:
            if ended.rid in attempts:
                attempts[ended.rid].put(ChoiceEnded(ended.choice, ended.reason))
        for request in step.ended:
            attempt = attempts.get(request.rid)
            if attempt is not None:
                self._forget(attempt)
                attempt.put(Ended(request))
        if step.HasField("snapshot"):
            self._update(step.snapshot)
        elif step.ended:
            self._changed()

    def _update(self, snapshot: pb.Snapshot, *, full: bool = False) -> None:
        if self.view is not None:
            self.view.update(snapshot)
            self.view.full = full
            self.draining = snapshot.draining
            self._changed()

    def _forget(self, attempt: Attempt) -> None:
        """The only place where an attempt leaves; a second call does nothing (fault B073)."""
        if self._attempts.pop(attempt.rid, None) is not None and self.view is not None:
            self.view.settle(attempt.seq)

    def _lose(self, cause: str) -> None:
        self.view = None
        self._outgoing.clear()
        lost, self._attempts = self._attempts, {}
        for attempt in lost.values():
            attempt.put(Lost(cause))
        self._changed()


def _split(submit: pb.Submit) -> Iterator[pb.RouterFrame]:
    """Long prompts travel in parts, so that they do not hold up others' tokens on the link."""
    ids = submit.prompt_ids
    if len(ids) <= MAX_IDS_PER_FRAME:
        yield pb.RouterFrame(submit=submit)
        return
    rest = list(ids[MAX_IDS_PER_FRAME:])
    del submit.prompt_ids[MAX_IDS_PER_FRAME:]
    yield pb.RouterFrame(submit=submit)
    for start in range(0, len(rest), MAX_IDS_PER_FRAME):
        part = pb.SubmitPart(rid=submit.rid, prompt_ids=rest[start : start + MAX_IDS_PER_FRAME])
        yield pb.RouterFrame(submit_part=part)
