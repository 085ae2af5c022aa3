"""A scriptable router: a real grpc.aio server behind a real TCP relay, on loopback.

A script is what the router does with one Generate call: frames to send, and steps (functions of
the call) in between. The relay lets a script break the connection under a call as a network does::

    async with FakeRouter([admitted(), delta(0, [1, 2], "ab"), cut]) as router:
        ... Client(router.address) ...
        assert router.calls[0].request.text == "prompt"
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from google.protobuf.message import Message
from legato.answer import Delta
from legato.errors import LegatoError, Reason, to_status, trailing_metadata
from legato.v1 import inference_pb2 as pb, inference_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]

WAIT_S = 10.0

_Reply = TypeVar("_Reply", bound=Message)


class GenerateCall:
    """One Generate call as the router saw it."""

    def __init__(self, router: FakeRouter, request: pb.GenerateRequest, context: _Context) -> None:
        self.router = router
        self.context = context
        self.request = request
        self.metadata = dict(context.invocation_metadata() or ())
        self.frames: list[pb.ClientFrame] = []  # all after the request
        self.half_closed = False
        self.cancelled = False  # ended by the client or by the connection, not by the script
        self.ended = asyncio.Event()
        self._heard = asyncio.Event()

    @property
    def credits(self) -> list[int]:
        """Tokens of the Credit frames so far."""
        return [f.credit.tokens for f in self.frames if f.WhichOneof("frame") == "credit"]

    @property
    def cancel_cause(self) -> str | None:
        """Of the Cancel frame; None when none came."""
        causes = [f.cancel.cause for f in self.frames if f.WhichOneof("frame") == "cancel"]
        return causes[0] if causes else None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until ``condition`` holds, asked again after each client frame."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    async def listen(self, frames: AsyncIterator[pb.ClientFrame]) -> None:
        async for frame in frames:
            self.frames.append(frame)
            self._heard.set()
        self.half_closed = True
        self._heard.set()


Step = pb.ServerFrame | Callable[[GenerateCall], Awaitable[None]]
Script = Sequence[Step] | Callable[[GenerateCall], Sequence[Step]]


# ---------------------------------------------------------------------------------------------
# Frames and steps of scripts.


def admitted(key: str = "key-1", *, token: bytes = b"token-1", **fields: Any) -> pb.ServerFrame:
    return pb.ServerFrame(admitted=pb.Admitted(request_key=key, resume_token=token, **fields))


def delta(
    start_index: int, ids: Iterable[int], text: str = "", *, choice: int = 0, **fields: Any
) -> pb.ServerFrame:
    return pb.ServerFrame(
        delta=pb.Delta(choice=choice, start_index=start_index, ids=ids, text=text, **fields)
    )


def finished(
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_LENGTH, **usage: Any
) -> pb.ServerFrame:
    return pb.ServerFrame(finished=pb.Finished(reason=reason, usage=pb.Usage(**usage)))


def refuse(error: LegatoError) -> Callable[[GenerateCall], Awaitable[None]]:
    """Aborts the call with a typed error."""

    async def step(call: GenerateCall) -> None:
        await _abort(call.context, error)

    return step


def reset(code: grpc.StatusCode) -> Callable[[GenerateCall], Awaitable[None]]:
    """Ends the call with a bare status, as a transport or proxy does."""

    async def step(call: GenerateCall) -> None:
        await call.context.abort(code, "reset")

    return step


async def hold(call: GenerateCall) -> None:
    """Does nothing more until the call is cancelled or cut."""
    await asyncio.Event().wait()


async def cut(call: GenerateCall) -> None:
    """Breaks all connections to this router under its calls; new ones are taken."""
    await asyncio.sleep(0.02)  # what was sent before gets through
    call.router.break_connections()
    await hold(call)


async def die(call: GenerateCall) -> None:
    """Breaks all connections to this router and takes no more."""
    await asyncio.sleep(0.02)
    call.router.refuse_connections()
    await cut(call)


async def until_cancel(call: GenerateCall) -> None:
    """Waits for the client's Cancel frame."""
    await call.until(lambda: call.cancel_cause is not None)


async def until_half_closed(call: GenerateCall) -> None:
    """Waits until the client has said that it sends no more."""
    await call.until(lambda: call.half_closed)


def until_credits(*tokens: int) -> Callable[[GenerateCall], Awaitable[None]]:
    """Waits until exactly these Credit frames have come, in this order."""

    async def step(call: GenerateCall) -> None:
        await call.until(lambda: call.credits == list(tokens))

    return step


HELLO: list[Step] = [admitted(), delta(0, [1, 2], "He"), delta(2, [3], "llo"), finished()]
BUSY = LegatoError(Reason.KV_CAPACITY, "full", "", {"free_blocks": "3"}, retry_after_s=0.05)

# ---------------------------------------------------------------------------------------------
# What a test asks about.


def text_of(deltas: Sequence[Delta], choice: int = 0) -> str:
    return "".join(d.text for d in deltas if d.choice == choice)


def ids_of(deltas: Sequence[Delta], choice: int = 0) -> list[int]:
    return [i for d in deltas if d.choice == choice for i in d.ids]


def client_tasks() -> list[str]:
    """Tasks of the client, its own and those that gRPC runs for its calls."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith(("AnswerStream", "_Stream", "StreamStream"))]


async def no_task_left(before: set[asyncio.Task[Any]]) -> None:
    """Fails unless all tasks begun since ``before`` end within a second."""
    for _ in range(100):
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"left behind: {left}")


# ---------------------------------------------------------------------------------------------


class FakeRouter(pb_grpc.InferenceServicer):
    """Answers the k-th Generate call by the k-th script (the last one serves all further calls).

    ``replies`` holds what unary methods answer, by method name: a message, or a LegatoError. A
    method without a reply never answers.
    ``credentials`` make the server speak TLS. ``address`` is the relay's.
    """

    def __init__(self, *scripts: Script, credentials: grpc.ServerCredentials | None = None) -> None:
        self.calls: list[GenerateCall] = []
        self.replies: dict[str, Message | LegatoError] = {}
        self.unary_requests: list[Message] = []
        self.address = ""
        self.num_connections = 0
        self._scripts = scripts
        self._credentials = credentials
        self._called = asyncio.Event()
        self._relays: set[_Relay] = set()

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        pb_grpc.add_InferenceServicer_to_server(self, self._server)
        if self._credentials is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = self._server.add_secure_port("127.0.0.1:0", self._credentials)
        await self._server.start()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Relay(self, port), "127.0.0.1", 0)
        self.address = f"localhost:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.refuse_connections()
        await self._server.stop(None)
        self.break_connections()

    async def call(self, number: int) -> GenerateCall:
        """The call with this number (from 0), once it has come."""
        async with asyncio.timeout(WAIT_S):
            while len(self.calls) <= number:
                self._called.clear()
                await self._called.wait()
        return self.calls[number]

    def break_connections(self) -> None:
        """Resets every open connection."""
        for relay in list(self._relays):
            relay.abort()

    def refuse_connections(self) -> None:
        """Listens no more."""
        self._listener.close()

    async def Generate(
        self,
        request_iterator: AsyncIterator[pb.ClientFrame],
        context: _Context,
    ) -> AsyncIterator[pb.ServerFrame]:
        first = await anext(request_iterator)
        assert first.WhichOneof("frame") == "request"
        call = GenerateCall(self, first.request, context)
        script = self._scripts[min(len(self.calls), len(self._scripts) - 1)]
        self.calls.append(call)
        self._called.set()
        listener = asyncio.create_task(call.listen(request_iterator))
        try:
            for step in script(call) if callable(script) else script:
                if isinstance(step, pb.ServerFrame):
                    yield step
                else:
                    await step(call)
        except (asyncio.CancelledError, GeneratorExit):
            call.cancelled = True
            raise
        finally:
            listener.cancel()
            call.ended.set()

    async def GenerateOnce(
        self, request: pb.GenerateRequest, context: _Context
    ) -> pb.GenerateOnceResponse:
        return await self._reply(pb.GenerateOnceResponse, "GenerateOnce", request, context)

    async def Plan(self, request: pb.GenerateRequest, context: _Context) -> pb.PlanResponse:
        return await self._reply(pb.PlanResponse, "Plan", request, context)

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        return await self._reply(pb.ExplainResponse, "Explain", request, context)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: _Context
    ) -> pb.ListModelsResponse:
        return await self._reply(pb.ListModelsResponse, "ListModels", request, context)

    async def _reply(
        self, kind: type[_Reply], method: str, request: Message, context: _Context
    ) -> _Reply:
        self.unary_requests.append(request)
        if method not in self.replies:
            await asyncio.Event().wait()
        reply = self.replies[method]
        if isinstance(reply, LegatoError):
            await _abort(context, reply)
        assert isinstance(reply, kind)
        return reply


async def _abort(context: _Context, error: LegatoError) -> None:
    await context.abort(error.code, to_status(error).message, trailing_metadata(error))


class _Relay(asyncio.Protocol):
    """One client connection, passed on to the server byte for byte."""

    def __init__(self, router: FakeRouter, port: int) -> None:
        self._router = router
        self._port = port
        self._client: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._client = transport
        self._router.num_connections += 1
        self._router._relays.add(self)
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._server, _ = await loop.create_connection(
            lambda: _Backward(self), "127.0.0.1", self._port
        )
        for data in self._early:
            self._server.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._server is None:
            self._early.append(data)
        else:
            self._server.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()

    def send_back(self, data: bytes) -> None:
        if self._client is not None:
            self._client.write(data)

    def abort(self) -> None:
        self._connecting.cancel()
        self._router._relays.discard(self)
        for transport in (self._client, self._server):
            if transport is not None:
                transport.abort()


class _Backward(asyncio.Protocol):
    def __init__(self, relay: _Relay) -> None:
        self._relay = relay

    def data_received(self, data: bytes) -> None:
        self._relay.send_back(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.abort()
