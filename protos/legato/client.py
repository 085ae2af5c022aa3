"""The async client of Legato: streams an answer, and goes on with it through another router when a
connection breaks.

::

    import legato.client

    async with legato.client.Client("localhost:7070") as client:
        async for delta in client.stream("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

        answer = await client.generate(chat=[{"role": "user", "content": "Hi"}], temperature=0.7)
        print(answer.text, answer.finish_reason, answer.usage.completion_tokens)

Needs gRPC and protobuf only. Every failure is a :class:`~legato.errors.LegatoError`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Self, TypeVar, Unpack

import grpc

from .answer import Answer, Choice, Delta, FinishReason, assemble
from .errors import LegatoError, Reason, from_rpc_error, invalid
from .request import GenerateFields, build_request
from .retry import RetryLimits, is_lost
from .routers import Metadata, Routers, Tls, closed_error, metadata
from .stream import AnswerStream
from .v1 import inference_pb2 as pb
from .v1.inference_pb2_grpc import InferenceStub

__all__ = [
    "Answer",
    "AnswerStream",
    "Choice",
    "Client",
    "Delta",
    "FinishReason",
    "GenerateFields",
    "LegatoError",
    "Reason",
    "Tls",
]

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class Client:
    """Calls the routers of one fleet. Owns their channels and its open streams; :meth:`aclose`
    (or leaving ``async with``) ends both. For one event loop; any number of concurrent calls.

    ``address``: one gRPC target, or several with commas between (``"a:7070,b:7070"``), each a
    router: calls go round them, and a broken answer goes on at the next. ``dns:///name:7070``
    spreads calls over all addresses of a name (a headless Service). ``tls``: None = plaintext.
    ``token``: bearer token; refused over plaintext to anything but this machine. ``tenant``: for
    routers without authentication. ``max_resumes``: calls per answer, beyond the first, that lost
    connections may cost; 0 = none.

    Options of calls: ``timeout_s`` is a gRPC deadline over all tries of a request, in seconds.
    ``retry_for_s``: a refusal that names a retry time (RESOURCE_EXHAUSTED) is obeyed as long as the
    next try starts within this time; 0 = it is raised at once. ``traceparent``: W3C trace context.
    """

    def __init__(
        self,
        address: str = "localhost:7070",
        *,
        tls: Tls | None = None,
        token: str = "",
        tenant: str = "",
        max_resumes: int = 3,
    ) -> None:
        RetryLimits(max_resumes=max_resumes)  # refuses a bad value here, not at the first call
        metadata(token=token, tenant=tenant)
        self._routers = Routers(address, tls=tls, token=token)
        self._token = token
        self._tenant = tenant
        self._max_resumes = max_resumes
        # Weak: a stream that was never started, or has ended, is its user's alone. A running one
        # is kept alive by its task.
        self._streams: weakref.WeakSet[AnswerStream] = weakref.WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends all open streams (their readers get CANCELLED) and closes the channels."""
        for stream in list(self._streams):
            await stream.aclose()
        await self._routers.close()

    def stream(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        retry_for_s: float = 0.0,
        traceparent: str = "",
        **fields: Unpack[GenerateFields],
    ) -> AnswerStream:
        """The answer to one request as it is generated; the call starts when it is first used.

        Raises INVALID_ARGUMENT, naming the field, for a value that the field cannot hold. ::

            async with client.stream("1, 2, 3,", initial_credit=8, n=2) as stream:
                async for delta in stream:
                    print(delta.choice, delta.text)
                    await stream.grant(len(delta.ids) or 1)
        """
        request = build_request(prompt, fields)
        return self._open(request, timeout_s, retry_for_s, traceparent, half_close=False)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        retry_for_s: float = 0.0,
        traceparent: str = "",
        **fields: Unpack[GenerateFields],
    ) -> Answer:
        """The whole answer to one request. Streams underneath, so that a broken connection costs
        no token; cancelling the task cancels the request. Takes what :meth:`stream` takes, without
        ``initial_credit``. ::

            answer = await client.generate(token_ids=[1, 2, 3], max_tokens=16, timeout_s=30)
        """
        request = build_request(prompt, fields)
        if request.HasField("initial_credit"):
            raise invalid("initial_credit", "nobody grants more here; pace with stream()")
        stream = self._open(request, timeout_s, retry_for_s, traceparent, half_close=True)
        deltas = [delta async for delta in stream]
        assert stream.admitted is not None and stream.finished is not None
        n = request.n if request.HasField("n") else 1
        return assemble(deltas, n=n, admitted=stream.admitted, finished=stream.finished)

    async def plan(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float = 10.0,
        traceparent: str = "",
        **fields: Unpack[GenerateFields],
    ) -> pb.PlanResponse:
        """What would happen to a request now (would it fit, where, how soon), without running
        it. ::

            plan = await client.plan("Once upon a time", max_tokens=4096)
            print(plan.admissible, plan.reason, plan.blocks_needed)
        """
        request = build_request(prompt, fields)
        call_metadata = self._metadata(request.request_id, traceparent)
        return await self._ask(lambda stub: stub.Plan, request, call_metadata, timeout_s)

    async def explain(self, request_key: str, *, timeout_s: float = 10.0) -> pb.ExplainResponse:
        """The timeline of a recent request, by ``AnswerStream.request_key`` or
        ``Answer.admitted.request_key``. Asks the routers in turn: only the one that served the
        request knows it. Raises NOT_FOUND's error when none does."""
        request = pb.ExplainRequest(request_key=request_key)
        return await self._ask(
            lambda stub: stub.Explain,
            request,
            self._metadata(),
            timeout_s,
            passed_over=(grpc.StatusCode.NOT_FOUND,),
        )

    async def list_models(self, *, timeout_s: float = 10.0) -> list[pb.Model]:
        """The served models and their limits."""
        request = pb.ListModelsRequest()
        response = await self._ask(
            lambda stub: stub.ListModels, request, self._metadata(), timeout_s
        )
        return list(response.models)

    def _metadata(self, request_id: str = "", traceparent: str = "") -> Metadata:
        return metadata(
            token=self._token,
            tenant=self._tenant,
            request_id=request_id,
            traceparent=traceparent,
        )

    def _open(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        retry_for_s: float,
        traceparent: str,
        *,
        half_close: bool,
    ) -> AnswerStream:
        stream = AnswerStream(
            request,
            self._routers,
            self._metadata(request.request_id, traceparent),
            RetryLimits(timeout_s, self._max_resumes, retry_for_s),
            half_close=half_close,
        )
        self._streams.add(stream)
        return stream

    async def _ask(
        self,
        method: Callable[[InferenceStub], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        call_metadata: Metadata,
        timeout_s: float,
        passed_over: tuple[grpc.StatusCode, ...] = (),
    ) -> _Response:
        """One unary call, made again at each further router while connections fail or the status
        is one of ``passed_over``. Only for calls that change nothing."""
        RetryLimits(timeout_s)
        now = asyncio.get_running_loop().time
        end = now() + timeout_s
        router: int | None = None
        tried = 0
        while True:
            router, stub = self._routers.pick(after=router)
            tried += 1
            try:
                return await method(stub)(request, timeout=end - now(), metadata=call_metadata)
            except asyncio.CancelledError:
                # A channel that closes cancels its calls; their tasks were not cancelled by it.
                task = asyncio.current_task()
                if self._routers.closed and task is not None and not task.cancelling():
                    raise closed_error() from None
                raise
            except grpc.aio.AioRpcError as error:
                passing = is_lost(error) or error.code() in passed_over
                if not passing or tried == len(self._routers):
                    raise from_rpc_error(error) from error
