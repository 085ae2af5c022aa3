"""The public Inference service: the door. Everything is checked here before it costs anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from legato.errors import LegatoError, Reason, invalid
from legato.v1 import inference_pb2 as pb, inference_pb2_grpc

from . import resume_token
from .client_call import ClientReader, Context, abort, write_all
from .collect import check_unary_size, collect
from .config import RouterConfig
from .dispatcher import Dispatcher
from .relay import Relay
from .served_model import ServedModel, limits_of, workers_of
from .submit_message import Ticket
from .timeline import Timeline, TimelineStore
from .validate import check_prompt, validate
from .validated import ModelLimits, PreparedRequest
from .worker_link import WorkerLink

MAX_TENANT_BYTES = 128
MAX_TRACEPARENT_BYTES = 128
AFFINITY_IDS = 64
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the service gets time, keys and seeds from."""

    clock: Callable[[], float]
    new_key: Callable[[], str]
    new_seed: Callable[[], int]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Stateless but for the requests in progress. Belongs to one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        models: dict[str, ServedModel],
        links: list[WorkerLink],
        dispatcher: Dispatcher,
        timelines: TimelineStore,
        sources: Sources,
        resume_key: bytes,
    ) -> None:
        self._config = config
        self._models = models
        self._links = links
        self._dispatcher = dispatcher
        self._timelines = timelines
        self._sources = sources
        self._resume_key = resume_key
        self.num_requests = 0
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    # -- RPCs ----------------------------------------------------------------------------------

    async def Generate(  # type: ignore[override]  # writes itself, so that a write can time out
        self,
        request_iterator: AsyncIterator[pb.ClientFrame],
        context: Context,
    ) -> None:
        client = ClientReader(request_iterator)
        try:
            request = await client.request()  # a call counts once it has asked for something
            with self._counted():
                relay = await self._open(request, context)
                client.follow(relay)
                async with contextlib.aclosing(relay.frames()) as frames:
                    await write_all(context, frames, self._config.slow_reader_s)
        except Exception as error:
            await client.opened()
            client.close()
            await abort(context, error)
        finally:
            client.close()

    async def GenerateOnce(
        self,
        request: pb.GenerateRequest,
        context: Context,
    ) -> pb.GenerateOnceResponse:
        try:
            with self._counted():
                if request.HasField("initial_credit"):
                    raise invalid("initial_credit", "has no meaning for GenerateOnce")
                relay = await self._open(request, context)
                check_unary_size(relay.prepared)
                async with contextlib.aclosing(relay.frames()) as frames:
                    return await collect(frames)
        except Exception as error:
            await abort(context, error)

    async def Plan(
        self,
        request: pb.GenerateRequest,
        context: Context,
    ) -> pb.PlanResponse:
        try:
            with self._counted():
                model = self._model(request.model)
                prepared, _ = await self._prepare(request, model)
        except LegatoError as error:
            return pb.PlanResponse(reason=error.reason.value, message=str(error))
        ranked = self._dispatcher.ranked(model, prepared)
        response = pb.PlanResponse(
            admissible=bool(ranked),
            prompt_tokens=len(prepared.prompt_ids),
            blocks_needed=prepared.blocks_needed,
        )
        if not ranked:
            response.reason = Reason.QUEUE_FULL.value
            response.message = "no worker has room now; the request would wait"
        for score_s, link in ranked:
            if link.view is not None:
                snapshot = link.view.snapshot
                response.workers.add(
                    worker=link.worker_id,
                    score_s=score_s,
                    free_blocks=snapshot.free_blocks + snapshot.cached_blocks,
                    running=snapshot.running,
                    waiting=link.view.num_waiting,
                )
        return response

    async def Explain(
        self,
        request: pb.ExplainRequest,
        context: Context,
    ) -> pb.ExplainResponse:
        timeline = self._timelines.get(request.request_key)
        if timeline is None:
            message = "not a recent request of this router"
            await abort(context, LegatoError(Reason.REQUEST_NOT_FOUND, message, "request_key"))
        return pb.ExplainResponse(request_key=request.request_key, events=timeline.events)

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: Context,
    ) -> pb.ListModelsResponse:
        response = pb.ListModelsResponse()
        for model in self._models.values():
            entry = response.models.add(
                name=model.name,
                fingerprint=model.fingerprint,
                has_chat_template=model.has_chat_template,
            )
            specs = [link.view.model for link in workers_of(model, self._links) if link.view]
            if specs:
                limits = limits_of(specs)
                entry.workers = len(specs)
                entry.vocab_size = limits.vocab_size
                entry.max_model_len = limits.max_model_len
                entry.max_n = limits.max_n
        return response

    # -- from request to relay -----------------------------------------------------------------

    async def _open(self, request: pb.GenerateRequest, context: Context) -> Relay:
        """Checks and prepares a request. Raises LegatoError; nothing has been placed by then."""
        sources, timeline = self._sources, Timeline(self._sources.clock)
        key = sources.new_key()
        metadata = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        tenant = metadata.get("x-legato-tenant", "")
        if len(tenant) > MAX_TENANT_BYTES:
            raise invalid("x-legato-tenant", f"at most {MAX_TENANT_BYTES} bytes")
        self._timelines.keep(key, timeline)
        try:
            model = self._model(request.model)
            prepared, limits = await self._prepare(request, model)
            timeline.add("tokenized", prompt_tokens=len(prepared.prompt_ids))
        except LegatoError as error:
            timeline.add("refused", reason=error.reason.value)
            raise
        checked = prepared.request
        seed = checked.sampling.seed
        if seed is None:
            seed = sources.new_seed()
        left_s = context.time_remaining()
        deadlines = [
            None if left_s is None else timeline.elapsed_s() + left_s,
            checked.objective.deadline_s,
        ]
        ticket = Ticket(
            request_key=key,
            tenant=tenant,
            traceparent=metadata.get("traceparent", "")[:MAX_TRACEPARENT_BYTES],
            seed=seed,
            resume_token=resume_token.sign(
                resume_token.ResumeClaims(seed, prepared.max_tokens),
                checked,
                prepared.prompt_ids,
                fingerprint=model.fingerprint,
                key=self._resume_key,
            ),
            affinity=_affinity(checked.session, prepared.prompt_ids),
            deadline_s=min((d for d in deadlines if d is not None), default=None),
        )
        return Relay(
            self._dispatcher,
            model,
            prepared,
            ticket,
            timeline,
            eos_token_ids=limits.eos_token_ids,
            window=max(self._config.window_tokens, 16 * checked.n),
        )

    async def _prepare(
        self, request: pb.GenerateRequest, model: ServedModel
    ) -> tuple[PreparedRequest, ModelLimits]:
        specs = [link.view.model for link in workers_of(model, self._links) if link.view]
        if not specs:
            raise LegatoError(
                Reason.NO_WORKER,
                f"no worker serves {model.name!r} now",
                retry_after_s=RETRY_AFTER_S,
            )
        limits = limits_of(specs)
        checked = validate(request, limits)
        prompt_ids = await model.pool.encode(checked.prompt)
        if checked.resume is not None:
            checked = resume_token.verify(
                checked, prompt_ids, fingerprint=model.fingerprint, key=self._resume_key
            )
        return check_prompt(checked, prompt_ids, limits), limits

    def _model(self, name: str) -> ServedModel:
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = self._models.get(name)
        if model is None:
            served = ", ".join(sorted(self._models))
            raise LegatoError(
                Reason.MODEL_NOT_FOUND,
                f"model {name[:64]!r} is not served here; served: {served}",
                "model",
            )
        return model

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A request is in this router from here to the end of the block, however it ends."""
        if self.draining:
            raise LegatoError(Reason.DRAINING, "this router is draining", retry_after_s=0.0)
        if self.num_requests >= self._config.max_requests:
            raise LegatoError(
                Reason.QUEUE_FULL,
                f"{self.num_requests} requests are in this router, its limit",
                metadata={"limit": str(self._config.max_requests)},
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_requests += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self.idle.set()


def _affinity(session: str, prompt_ids: Sequence[int]) -> bytes:
    """What should meet on one worker: a session, or prompts that begin alike."""
    if session:
        return b"s" + session.encode()
    digest = blake2b(digest_size=8)
    for token_id in prompt_ids[:AFFINITY_IDS]:
        digest.update(token_id.to_bytes(4, "little"))
    return b"p" + digest.digest()
