"""A router process: links to workers, gRPC server, health, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from legato.endpoints import SERVER_OPTIONS, refuse_open
from legato.v1 import inference_pb2, inference_pb2_grpc

from .chat import ChatTemplate
from .config import RouterConfig
from .dispatcher import Dispatcher
from .served_model import ServedModel, workers_of
from .service import InferenceService, Sources
from .timeline import TimelineStore
from .tokenizer import ModelTokenizer, TokenizerPool
from .waiting_room import WaitingRoom
from .worker_link import RouterIdentity, WorkerLink

HEALTH_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH_PERIOD_S = 0.5
MAX_TIMELINES = 1000
MAX_PROMPT_TOKENS = 1 << 20
log = structlog.get_logger("legato.router")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the store gives it; the router reads its tokenizer and chat template only."""

    name: str
    path: Path
    fingerprint: str


@dataclass(slots=True)
class RouterProcess:
    """What :func:`serve` runs, for callers that embed it."""

    port: int
    service: InferenceService
    links: list[WorkerLink]
    stop: asyncio.Event


def load_model(source: ModelSource, *, max_model_len: int, num_threads: int) -> ServedModel:
    """Reads tokenizer and chat template; takes a second or two."""
    tokenizer = ModelTokenizer.load(source.path)
    template = ChatTemplate.load(source.path)
    pool = TokenizerPool(tokenizer, template, max_model_len=max_model_len, num_threads=num_threads)
    return ServedModel(source.name, source.fingerprint, tokenizer, pool, template is not None)


async def serve(
    config: RouterConfig,
    sources: list[ModelSource],
    *,
    ready: Callable[[RouterProcess], None] | None = None,
    handle_signals: bool = True,
) -> int:
    """Runs a router until SIGTERM or SIGINT; returns the process's exit code.

    SIGTERM refuses new requests, waits ``drain_s`` for open ones, and ends those left; a second
    signal ends at once.
    """
    refuse_open(config.listen, allow_open=config.allow_open)
    loop = asyncio.get_running_loop()
    models: dict[str, ServedModel] = {}
    for source in sources:
        models[source.name] = await loop.run_in_executor(None, _load, source, config)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError:
        raise ValueError(f"cannot listen on {config.listen}: is it in use?") from None
    identity = RouterIdentity(config.router_id or f"{os.uname().nodename}:{port}", uuid.uuid4().hex)
    room = WaitingRoom(max_requests=config.max_queued, max_tokens=config.max_queued_tokens)
    links = [
        WorkerLink(address, identity, changed=room.changed, clock=time.monotonic, random=Random())
        for address in config.workers
    ]
    service = InferenceService(
        config,
        models,
        links,
        Dispatcher(links, room, config.max_queue_s),
        TimelineStore(MAX_TIMELINES),
        Sources(time.monotonic, lambda: uuid.uuid4().hex, lambda: secrets.randbits(63)),
        config.resume_key.encode() or secrets.token_bytes(32),
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        (HEALTH_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    stop = asyncio.Event()
    process = RouterProcess(port, service, links, stop)
    if handle_signals:
        _handle_signals(loop, stop)
    await server.start()
    tasks = [asyncio.create_task(link.run()) for link in links]
    tasks.append(asyncio.create_task(_watch_health(health_servicer, process, models)))
    log.info(
        "router ready",
        router=identity.router_id,
        listen=f"{config.listen.rpartition(':')[0]}:{port}",
        workers=list(config.workers),
        models=list(models),
    )
    if ready is not None:
        ready(process)
    try:
        await stop.wait()
        service.draining = True
        await health_servicer.enter_graceful_shutdown()
        log.info("draining", requests=service.num_requests, deadline_s=config.drain_s)
        await asyncio.wait([asyncio.create_task(service.idle.wait())], timeout=config.drain_s)
    finally:
        await server.stop(grace=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in models.values():
            model.pool.close()
    return 0


def _load(source: ModelSource, config: RouterConfig) -> ServedModel:
    # The workers' limit is not known yet; each request is checked against it.
    return load_model(source, max_model_len=MAX_PROMPT_TOKENS, num_threads=config.tokenizer_threads)


def _handle_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            os._exit(130)  # asked twice: no more waiting
        asked = True
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)


async def _watch_health(
    servicer: health.aio.HealthServicer,
    process: RouterProcess,
    models: dict[str, ServedModel],
) -> None:
    """SERVING while each model has a worker that takes requests."""
    current = None
    while True:
        serving = all(
            any(not link.draining for link in workers_of(model, process.links))
            for model in models.values()
        )
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        if status != current:
            current = status
            for name in ("", HEALTH_SERVICE):
                await servicer.set(name, status)
        await asyncio.sleep(HEALTH_PERIOD_S)
