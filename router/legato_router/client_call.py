"""The call of a client: what it sends, what it is sent, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import structlog
from legato.errors import LegatoError, Reason, invalid, trailing_metadata
from legato.v1 import inference_pb2 as pb

from .relay import Relay

FIRST_FRAME_S = 10.0
OPENED_S = 1.0
log = structlog.get_logger("legato.router")

Context = grpc.aio.ServicerContext[Any, Any]


class ClientReader:
    """Reads a client's frames in one task, which ends with the call by itself: in grpc.aio a read
    that is cancelled leaks (grpc/grpc#43360)."""

    def __init__(self, frames: AsyncIterator[pb.ClientFrame]) -> None:
        self._first: asyncio.Future[pb.GenerateRequest] = asyncio.get_running_loop().create_future()
        self._relay: Relay | None = None
        self._cancelled = False
        self._granted = 0
        self._closed = False
        self._task = asyncio.create_task(self._read(frames))
        self._task.add_done_callback(self._ended)

    async def request(self) -> pb.GenerateRequest:
        """The request of the first frame. Raises INVALID_ARGUMENT."""
        await asyncio.wait((self._first,), timeout=FIRST_FRAME_S)
        if not self._first.done():
            raise invalid("request", f"no request within {FIRST_FRAME_S:g} s")
        return self._first.result()

    async def opened(self) -> None:
        """Returns once the request has been read, or does not come. A call that ends before is told
        to its client as INTERNAL by grpc.aio, whose own write then meets a closed call."""
        await asyncio.wait((self._first,), timeout=OPENED_S)

    def follow(self, relay: Relay) -> None:
        """Passes what comes on to ``relay``, and what came meanwhile."""
        self._relay = relay
        if self._granted:
            relay.grant(self._granted)
        if self._cancelled:
            relay.cancel()

    def close(self) -> None:
        """The call is over: what still comes is for nobody."""
        self._closed = True
        self._relay = None

    async def _read(self, frames: AsyncIterator[pb.ClientFrame]) -> None:
        async for frame in frames:
            kind = frame.WhichOneof("frame")
            if not self._first.done():
                if kind != "request":
                    raise invalid("request", "must be the first frame")
                self._first.set_result(frame.request)
            elif kind == "credit":
                self._granted += frame.credit.tokens
                if self._relay is not None:
                    self._relay.grant(frame.credit.tokens)
            elif kind == "cancel":
                self._cancelled = True
                if self._relay is not None:
                    self._relay.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self._first.done():
            missing = invalid("request", "the call carried no request that could be read")
            self._first.set_exception(error if isinstance(error, LegatoError) else missing)
            self._first.exception()  # seen, even if the call is over
        elif error is not None and not self._closed:
            log.warning("a client's frames could not be read", error=repr(error))


async def write_all(
    context: Context, frames: AsyncIterator[pb.ServerFrame], slow_reader_s: float
) -> None:
    """Raises SLOW_READER when the transport takes no frame for ``slow_reader_s`` (fault B064)."""
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(None) as limit:
            async for frame in frames:
                limit.reschedule(now() + slow_reader_s)
                await context.write(frame)
                limit.reschedule(None)
    except TimeoutError:
        if not limit.expired():
            raise
        message = f"took nothing for slow_reader_s = {slow_reader_s:g} s"
        raise LegatoError(Reason.SLOW_READER, message) from None


async def abort(context: Context, error: Exception) -> NoReturn:
    if not isinstance(error, LegatoError):
        log.error("a request failed", exc_info=error)
        error = LegatoError(Reason.INTERNAL, f"the router failed: {type(error).__name__}")
    await context.abort(error.code, str(error), trailing_metadata=trailing_metadata(error))
    raise AssertionError("abort raises")
