"""The Worker service: routers' streams in, engine commands out, and back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from legato.capacity import blocks_needed
from legato.errors import LegatoError, Reason, invalid, trailing_metadata
from legato.v1 import worker_pb2 as pb, worker_pb2_grpc

from . import frames
from .core.output import Counters, EndCause
from .engine import Add, Cancel, EndAll, Engine, EngineUpdate, Grant
from .ledger import Ledger
from .link import PartialPrompt, RouterLink
from .routes import Routes
from .runners.base import RunnerSpec
from .submission import to_request

PROTOCOL_VERSION = 1
RETRY_S = 0.5
END_S = 5.0
log = structlog.get_logger("legato.worker")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is: its name, this start of it, and the model it serves."""

    worker_id: str
    incarnation: str
    model: pb.ModelSpec


Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Lives on the event loop. Owner of the links, the ledger and the request routes; the engine is
    reached by its mailbox only and answers through :meth:`dispatch`."""

    def __init__(
        self,
        identity: Identity,
        spec: RunnerSpec,
        ledger: Ledger,
        clock: Callable[[], float],
        settings: dict[str, str],
        drain_s: float,
    ) -> None:
        self._identity = identity
        self._spec = spec
        self._ledger = ledger
        self._clock = clock
        self._settings = settings
        self._drain_s = drain_s
        self._engine: Engine | None = None
        self._links: set[RouterLink] = set()
        self._routes = Routes()
        self._next_key = 1
        self._counters = Counters(0, spec.num_blocks, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._cached_hashes: Callable[[], list[bytes]] = list
        self.draining = False

    def connect(self, engine: Engine, cached_hashes: Callable[[], list[bytes]]) -> None:
        """Names the engine behind this service; to be called once, before serving."""
        self._engine = engine
        self._cached_hashes = cached_hashes

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the service was started without an engine"
        return self._engine

    # -- RPCs ----------------------------------------------------------------------------------

    async def Attach(
        self, request_iterator: AsyncIterator[pb.RouterFrame], context: Context
    ) -> AsyncIterator[pb.WorkerFrame]:
        incoming = aiter(request_iterator)
        try:
            first = await anext(incoming, None)
            if first is None:
                return
            link = self._open(first)
        except LegatoError as error:
            await context.abort(error.code, str(error), trailing_metadata=trailing_metadata(error))
        reader = asyncio.create_task(self._read(link, incoming))
        try:
            while (frame := await link.next_frame()) is not None:
                yield frame
        finally:
            reader.cancel()
            self._close(link)

    async def _read(self, link: RouterLink, incoming: AsyncIterator[pb.RouterFrame]) -> None:
        try:
            async for frame in incoming:
                self._handle(link, frame)
        finally:
            link.close()

    async def Drain(
        self,
        request: pb.DrainRequest,
        context: Context,
    ) -> pb.DrainResponse:
        return pb.DrainResponse(ended_early=await self.drain(request.deadline_s or self._drain_s))

    async def Describe(
        self,
        request: pb.DescribeRequest,
        context: Context,
    ) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            model=self._identity.model,
            snapshot=self._snapshot(0),
            settings=self._settings,
        )

    async def drain(self, deadline_s: float) -> int:
        """Takes no more requests, waits for the running ones, ends those left at the deadline.
        Returns how many were ended early."""
        self.draining = True
        for link in self._links:
            link.push(pb.WorkerFrame(draining=pb.Draining(deadline_s=deadline_s)))
        try:
            async with asyncio.timeout(deadline_s):
                await self._routes.empty.wait()
        except TimeoutError:
            left = len(self._routes)
            self.engine.send(EndAll(EndCause.DRAINING, "the worker's drain deadline passed"))
            with contextlib.suppress(TimeoutError):  # an engine that hangs keeps nobody here
                async with asyncio.timeout(END_S):
                    await self._routes.empty.wait()
            return left
        return 0

    def close_links(self) -> None:
        """Ends every Attach stream after what is already pushed (fault B097)."""
        for link in self._links:
            link.close()

    # -- from the engine -----------------------------------------------------------------------

    def dispatch(self, update: EngineUpdate) -> None:
        """Turns one engine update into one frame per link. Called on the event loop."""
        if update.counters is not None:
            self._counters = update.counters
            for link in self._links:
                link.applied(update.last_key)
        steps = self._routes.to_steps(update.output)
        for request in update.output.ended:
            self._ledger.release(request.key)
        for link in self._links:
            step = steps.get(link)
            if step is not None:
                if update.counters is not None:
                    step.snapshot.CopyFrom(self._snapshot(link.last_applied_seq))
                link.push(pb.WorkerFrame(step=step))
            elif update.counters is not None:
                link.push(pb.WorkerFrame(snapshot=self._snapshot(link.last_applied_seq)))
            if update.kv_events and link.wants_kv_events:
                link.push_hint(pb.WorkerFrame(kv_events=frames.kv_events(link, update.kv_events)))

    # -- from a router -------------------------------------------------------------------------

    def _open(self, frame: pb.RouterFrame) -> RouterLink:
        if frame.WhichOneof("frame") != "hello":
            raise invalid("hello", "the first frame must be Hello")
        hello = frame.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise invalid(
                "hello.protocol_version",
                f"this worker speaks version {PROTOCOL_VERSION}",
                limit=PROTOCOL_VERSION,
                observed=hello.protocol_version,
            )
        link = RouterLink(hello.router_id, kv_events=hello.kv_events)
        self._links.add(link)
        welcome = pb.Welcome(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            protocol_version=PROTOCOL_VERSION,
            model=self._identity.model,
            snapshot=self._snapshot(0),
        )
        link.push(pb.WorkerFrame(welcome=welcome))
        if self.draining:
            link.push(pb.WorkerFrame(draining=pb.Draining(deadline_s=self._drain_s)))
        return link

    def _close(self, link: RouterLink) -> None:
        """The router is gone: its requests end, and nobody is told."""
        self._links.discard(link)
        link.close()
        for key in self._routes.remove_link(link):
            self.engine.send(Cancel(key))

    def _handle(self, link: RouterLink, frame: pb.RouterFrame) -> None:
        match frame.WhichOneof("frame"):
            case "submit":
                self._submit(link, frame.submit)
            case "submit_part":
                self._submit_part(link, frame.submit_part)
            case "cancel":
                link.partial.pop(frame.cancel.rid, None)
                key = link.keys.get(frame.cancel.rid)
                if key is not None:
                    choice = frame.cancel.choice if frame.cancel.HasField("choice") else None
                    self.engine.send(Cancel(key, choice))
            case "credit":
                key = link.keys.get(frame.credit.rid)
                if key is not None:
                    self.engine.send(Grant(key, frame.credit.tokens))
            case "ping":
                link.push(pb.WorkerFrame(pong=pb.Pong(id=frame.ping.id)))
            case "kv_resync":
                everything = [(True, block_hash) for block_hash in self._cached_hashes()]
                events = frames.kv_events(link, everything, cleared=True)
                link.push(pb.WorkerFrame(kv_events=events))
            case _:
                pass  # a frame of a newer router: ignored

    def _submit(self, link: RouterLink, submit: pb.Submit) -> None:
        if submit.rid in link.keys or submit.rid in link.partial:
            self._refuse(link, submit, invalid("rid", "is in use", observed=submit.rid))
        elif submit.num_prompt_tokens > self._spec.max_model_len:
            self._accept(link, submit, submit.prompt_ids)  # is refused there, with the numbers
        elif len(submit.prompt_ids) < submit.num_prompt_tokens:
            link.partial[submit.rid] = PartialPrompt(submit, list(submit.prompt_ids))
        else:
            self._accept(link, submit, submit.prompt_ids)

    def _submit_part(self, link: RouterLink, part: pb.SubmitPart) -> None:
        partial = link.partial.get(part.rid)
        if partial is None:
            return  # refused or cancelled meanwhile
        partial.prompt_ids += part.prompt_ids
        if len(partial.prompt_ids) >= partial.submit.num_prompt_tokens:
            del link.partial[part.rid]
            self._accept(link, partial.submit, partial.prompt_ids)

    def _accept(self, link: RouterLink, submit: pb.Submit, prompt_ids: frames.Ids) -> None:
        key = self._next_key
        try:
            if self.draining:
                raise LegatoError(Reason.DRAINING, "the worker is draining", retry_after_s=RETRY_S)
            request = to_request(
                submit,
                prompt_ids,
                key=key,
                spec=self._spec,
                fingerprint=self._identity.model.fingerprint,
                now=self._clock(),
            )
            blocks = blocks_needed(
                len(prompt_ids), request.max_tokens, request.n, self._spec.block_size
            )
            self._ledger.reserve(key, blocks, RETRY_S)
        except LegatoError as error:
            self._refuse(link, submit, error)
            return
        except Exception as error:  # one request that breaks the gate is not to break the link
            log.exception("a request could not be taken")
            message = f"the worker could not take it: {type(error).__name__}: {error}"
            self._refuse(link, submit, LegatoError(Reason.INTERNAL, message))
            return
        self._next_key += 1
        self._routes.add(key, link, submit.rid)
        link.decided(key, submit.seq)
        self.engine.send(Add(request))
        accepted = pb.Accepted(
            rid=submit.rid,
            seq=submit.seq,
            reserved_blocks=blocks,
            estimated_ttft_s=self._estimated_ttft_s(len(prompt_ids)),
        )
        link.push(pb.WorkerFrame(accepted=accepted))

    def _refuse(self, link: RouterLink, submit: pb.Submit, error: LegatoError) -> None:
        link.decided(0, submit.seq)
        nack = pb.Nack(
            rid=submit.rid,
            seq=submit.seq,
            reason=error.reason.value,
            message=error.message,
            field=error.field,
            retry_after_s=error.retry_after_s or 0.0,
            snapshot=self._snapshot(link.last_applied_seq),
        )
        link.push(pb.WorkerFrame(nack=nack))

    def _estimated_ttft_s(self, num_prompt: int) -> float:
        rate = self.engine.stats.prefill_tokens_per_s
        return (self._counters.pending_prefill_tokens + num_prompt) / rate if rate else 0.0

    def _snapshot(self, last_applied_seq: int) -> pb.Snapshot:
        return frames.snapshot(
            self._counters,
            self.engine.stats,
            promised_blocks=self._ledger.promised_blocks,
            last_applied_seq=last_applied_seq,
            draining=self.draining,
        )
