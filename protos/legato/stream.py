"""One streamed answer: the calls behind it, their resumption, credit and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Self

import grpc

from .answer import Delta, Received
from .errors import LegatoError, Reason, from_rpc_error, invalid
from .retry import Retries, RetryLimits, is_lost
from .routers import Metadata, Routers
from .v1 import inference_pb2 as pb
from .v1.inference_pb2_grpc import InferenceStub

_Call = grpc.aio.StreamStreamCall[pb.ClientFrame, pb.ServerFrame]

STATUS_WAIT_S = 1.0
"""How long a finished answer waits for the status that closes its call."""


class AnswerStream:
    """The deltas of one answer, in order, without gap or duplicate.

    The call starts at the first use: entering ``async with``, or asking for the first delta.
    ``async for`` closes the stream when its loop is left, whichever way. ``await anext(stream)``
    does not, and may be cancelled or timed out without losing a delta; a stream read that way is
    closed by ``async with`` or :meth:`aclose`::

        async with client.stream("Once upon a time", max_tokens=64) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
            print(stream.finished.usage.completion_tokens)

    A call that its transport ends is continued on the next router, up to ``max_resumes`` times.
    A broken contract, a refusal and a failure raise :class:`~legato.errors.LegatoError`; so does
    reading from a closed stream (CANCELLED).

    Frames are read as they come, whether or not they are asked for: a slow consumer costs memory
    here (an answer at most, see ``max_tokens``) and holds nothing up. To hold the model back, give
    ``initial_credit`` and :meth:`grant`.

    Owner of its calls: one task reads them; it ends with the answer or with :meth:`aclose`.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        routers: Routers,
        metadata: Metadata,
        limits: RetryLimits,
        *,
        half_close: bool = False,
    ) -> None:
        """``half_close``: no frame follows the request, so ``grant`` and ``cancel`` are not for
        this stream."""
        self._request = request
        self._routers = routers
        self._metadata = metadata
        self._limits = limits
        self._half_close = half_close
        self._retries: Retries | None = None
        self._received = Received(request.n if request.HasField("n") else 1)
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()  # None = no more
        self._task: asyncio.Task[None] | None = None
        self._frames: asyncio.Queue[pb.ClientFrame | None] | None = None  # of the call in progress
        self._reading: _Call | None = None  # set while the task waits for a frame
        self._credit = request.initial_credit if request.HasField("initial_credit") else None
        self._cancel_cause: str | None = None
        self._cancelled = asyncio.Event()
        self._closed = False
        self._admitted: pb.Admitted | None = None
        self._finished: pb.Finished | None = None

    @property
    def admitted(self) -> pb.Admitted | None:
        """How the (latest) router admitted the request; None before. Set before the first delta."""
        return self._admitted

    @property
    def finished(self) -> pb.Finished | None:
        """Reason, usage and timings; None before the end, and when a cancelled answer ended
        without them."""
        return self._finished

    @property
    def request_key(self) -> str:
        """The router's key for ``Client.explain``; empty before ``admitted``."""
        return self._admitted.request_key if self._admitted else ""

    @property
    def num_resumes(self) -> int:
        """How many times a lost call was made again."""
        return self._retries.num_resumes if self._retries else 0

    async def grant(self, tokens: int) -> None:
        """Lets the router send ``tokens`` more (over all choices). After the end it does nothing.

        Raises INVALID_ARGUMENT for a stream without ``initial_credit``, or a number outside
        1..2^32-1.
        """
        if self._credit is None:
            raise invalid("initial_credit", "a stream without it is not paced: nothing to grant")
        if not 1 <= tokens < 1 << 32:
            raise invalid("credit.tokens", "must be 1..4294967295", observed=tokens)
        self._credit += tokens
        if self._frames is not None:
            self._frames.put_nowait(pb.ClientFrame(credit=pb.Credit(tokens=tokens)))

    async def cancel(self, cause: str = "") -> None:
        """Asks the router to end the answer. Its last deltas and ``finished`` (reason CANCELLED)
        still come: go on reading until the end. To drop everything at once, leave the loop."""
        if self._cancel_cause is None:
            self._cancel_cause = cause
            self._cancelled.set()
            if self._frames is not None:
                self._frames.put_nowait(pb.ClientFrame(cancel=pb.Cancel(cause=cause)))

    async def aclose(self) -> None:
        """Ends the call, if it still runs, and frees all that belongs to it. Idempotent."""
        self._closed = True
        if self._task is None or self._task.done():
            return
        if self._reading is not None:
            # The read then ends by itself. Cancelling a task within a read would leak the read's
            # memory in grpcio (grpc/grpc#43360).
            self._reading.cancel()
        else:
            self._task.cancel()
        await asyncio.wait({self._task})

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        # A generator, not self: Python closes it when the loop over it is left.
        try:
            while True:
                try:
                    delta = await self.__anext__()
                except StopAsyncIteration:
                    return
                yield delta
        finally:
            await self.aclose()

    async def __anext__(self) -> Delta:
        task = self._start()
        delta = await self._deltas.get()
        if delta is not None:
            return delta
        self._deltas.put_nowait(None)  # the end stays the end
        if task.cancelled():
            raise LegatoError(Reason.CANCELLED, "the stream was closed before its answer ended")
        if error := task.exception():
            raise error
        raise StopAsyncIteration

    @property
    def _resume_token(self) -> bytes:
        return self._admitted.resume_token if self._admitted else b""

    def _start(self) -> asyncio.Task[None]:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="legato-answer")
            self._task.add_done_callback(self._ended)
            if self._closed:
                self._task.cancel()
        return self._task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # seen, even if nobody reads on
        self._deltas.put_nowait(None)

    async def _run(self) -> None:
        """Calls routers until the answer is whole, or a failure is final."""
        now = asyncio.get_running_loop().time
        objective = self._request.objective
        worth_s = objective.deadline_s if objective.HasField("deadline_s") else math.inf
        self._retries = Retries(
            self._limits, start=now(), random=random.random, worthless_after_s=worth_s
        )
        router: int | None = None
        while not self._cancelled.is_set():
            router, stub = self._routers.pick(after=router)
            request = self._next_request(now())
            try:
                await self._attempt(stub, request, self._retries.timeout_s(now()))
                return
            except grpc.aio.AioRpcError as rpc_error:
                pause_s = self._pause_s(rpc_error, now())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._cancelled.wait()

    def _next_request(self, now: float) -> pb.GenerateRequest:
        """The request as asked for; and, when part of its answer is held, where to go on."""
        assert self._retries is not None
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        if request.objective.deadline_s > 0:  # what else it may be is for the router to refuse
            left_s = request.objective.deadline_s - self._retries.elapsed_s(now)
            request.objective.deadline_s = max(0.001, left_s)
        if self._credit is not None:
            request.initial_credit = max(0, self._credit - self._received.num_tokens)
        if self._admitted is not None:
            request.resume.CopyFrom(self._received.resume(self._resume_token))
        return request

    def _pause_s(self, rpc_error: grpc.aio.AioRpcError, now: float) -> float:
        """The pause before the next call. Raises the error that ends the answer."""
        assert self._retries is not None
        error, lost = from_rpc_error(rpc_error), is_lost(rpc_error)
        if self._cancelled.is_set() and (lost or error.reason is Reason.CANCELLED):
            return 0.0  # the answer was to end anyway
        continuing = self._admitted is not None
        is_final = self._closed or (continuing and not self._resume_token)
        pause_s = (
            None
            if is_final
            else self._retries.pause_s(error, lost=lost, continuing=continuing, now=now)
        )
        if pause_s is None:
            raise error from rpc_error
        return pause_s

    async def _attempt(
        self, stub: InferenceStub, request: pb.GenerateRequest, timeout_s: float | None
    ) -> None:
        """One call, until its answer is whole."""
        frames: asyncio.Queue[pb.ClientFrame | None] = asyncio.Queue()
        frames.put_nowait(pb.ClientFrame(request=request))
        if self._half_close:
            frames.put_nowait(None)
        call = stub.Generate(_until_none(frames), timeout=timeout_s, metadata=self._metadata)
        self._frames = frames
        try:
            while self._take(await self._read(call)):
                pass
            # The status follows at once; waiting for it lets the call end well on both sides.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_WAIT_S):
                    await call.code()
        finally:
            self._frames = None
            frames.put_nowait(None)
            call.cancel()

    async def _read(self, call: _Call) -> object:
        self._reading = call
        try:
            return await call.read()
        finally:
            self._reading = None

    def _take(self, frame: object) -> bool:
        """Takes in one frame; False after the last. Kinds that a newer router may send are passed
        over."""
        if not isinstance(frame, pb.ServerFrame):
            raise LegatoError(Reason.INTERNAL, "the call ended before its answer was finished")
        kind = frame.WhichOneof("frame")
        if kind in ("delta", "finished") and self._admitted is None:
            raise LegatoError(Reason.INTERNAL, f"{kind} came before admitted")
        match kind:
            case "admitted":
                self._admitted = frame.admitted
            case "delta":
                delta = self._received.accept(frame.delta)
                if delta is not None:
                    self._deltas.put_nowait(delta)
            case "finished":
                self._finished = frame.finished
                return False
        return True


async def _until_none(
    frames: asyncio.Queue[pb.ClientFrame | None],
) -> AsyncIterator[pb.ClientFrame]:
    while (frame := await frames.get()) is not None:
        yield frame
