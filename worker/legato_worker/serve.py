"""A worker process: runner, engine thread, gRPC server, health, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from legato.block_hash import block_hash
from legato.endpoints import SERVER_OPTIONS, refuse_open
from legato.v1 import worker_pb2 as pb, worker_pb2_grpc

from .config import WorkerConfig
from .core.block_pool import BlockPool
from .core.config import FCFS_AGEING_S, PRIORITY_AGEING_S, SchedulerConfig
from .core.kv_cache import KVCacheManager
from .core.policies import BatchingPolicy, CapacityPolicy, Continuous, OnDemand, Reserve, Static
from .core.scheduler import Scheduler
from .decision_log import DecisionLog
from .engine import Engine, EngineUpdate
from .ledger import Ledger
from .runners.base import Runner
from .runners.simulated import SimulatedConfig, SimulatedRunner, StepTimeModel
from .service import Identity, WorkerService

HEALTH_SERVICE = "legato.v1.Worker"
HEALTH_PERIOD_S = 0.5
log = structlog.get_logger("legato.worker")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the store gives it. ``path`` is unused by the simulated runner."""

    name: str
    path: Path
    fingerprint: str


@dataclass(slots=True)
class WorkerProcess:
    """What :func:`serve` runs, for callers that embed it. ``failure``: what the engine died of."""

    port: int
    service: WorkerService
    engine: Engine
    stop: asyncio.Event
    failure: BaseException | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


def simulated_config(config: WorkerConfig) -> SimulatedConfig:
    """What a worker's settings say of its simulated runner."""
    return SimulatedConfig(
        vocab_size=config.simulated_vocab_size,
        block_size=config.block_size,
        num_blocks=config.num_blocks or 4096,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or 8192,
        eos_probability=0.005,
        step_time=StepTimeModel(
            base_s=config.simulated_base_ms / 1e3,
            per_token_s=config.simulated_per_token_us / 1e6,
        ),
        seed=config.seed,
    )


def build_runner(config: WorkerConfig, source: ModelSource) -> Runner:
    """Loads the model onto its device. Raises with a message that says what is wrong."""
    if config.runner == "simulated":
        return SimulatedRunner(simulated_config(config), time.sleep)
    # Imported here: a simulated worker, and `--help`, do without torch.
    from .runners.cpu_threads import limit_spinning

    limit_spinning(os.environ)
    import torch
    from legato_kernels import dispatch

    from .runners.torch_loader import load_torch_runner

    if dispatch.REASON:
        log.warning("slower kernels", backend=dispatch.BACKEND, reason=dispatch.REASON)
    else:
        log.info("kernels", backend=dispatch.BACKEND)
    dtype = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
    }[config.dtype]
    return load_torch_runner(
        source.path,
        dtype=dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_memory_bytes=config.kv_memory_bytes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_threads=config.num_threads,
    )


def build_scheduler(
    config: WorkerConfig, runner: Runner, log_sink: DecisionLog | None
) -> Scheduler:
    spec = runner.spec
    capacity: CapacityPolicy = OnDemand() if config.capacity == "on_demand" else Reserve()
    batching: BatchingPolicy = Continuous() if config.batching == "continuous" else Static()
    budget, chunk = config.max_num_batched_tokens, config.max_prefill_chunk
    if config.batching == "static":
        # A fixed group is formed whole and its prompts are computed whole.
        budget = chunk = spec.max_num_seqs * spec.max_model_len
    pool = BlockPool(spec.num_blocks, record_events=True)
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=chunk,
            max_model_len=spec.max_model_len,
            vocab_size=spec.vocab_size,
            capacity=capacity,
            batching=batching,
            ageing_s=PRIORITY_AGEING_S if config.order == "priority" else FCFS_AGEING_S,
            max_queue_s=config.max_queue_s,
            slow_reader_s=config.slow_reader_s,
        ),
        KVCacheManager(pool, spec.block_size, block_hash, prefix_cache=config.prefix_cache),
        log_sink,
    )


async def serve(
    config: WorkerConfig,
    source: ModelSource,
    *,
    load: Callable[[WorkerConfig, ModelSource], Runner] = build_runner,
    ready: Callable[[WorkerProcess], None] | None = None,
    handle_signals: bool = True,
) -> int:
    """Runs a worker until SIGTERM, SIGINT or a failure; returns the process's exit code. ``load``
    is called in a thread.

    SIGTERM drains (``drain_s``); a second signal ends at once. Exit code 1 tells that the engine
    failed, so that a supervisor starts the process again.
    """
    refuse_open(config.listen, allow_open=config.allow_open)
    loop = asyncio.get_running_loop()
    runner = await loop.run_in_executor(None, load, config, source)
    spec = runner.spec
    decisions = DecisionLog.open(Path(config.decision_log)) if config.decision_log else None
    scheduler = build_scheduler(config, runner, decisions)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError:
        raise ValueError(f"cannot listen on {config.listen}: is it in use?") from None
    name = config.worker_id or f"{os.uname().nodename}:{port}"
    model = pb.ModelSpec(
        name=config.served_name or source.name,
        fingerprint=source.fingerprint,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        max_num_seqs=spec.max_num_seqs,
        eos_token_ids=spec.eos_token_ids,
    )
    service = WorkerService(
        Identity(name, uuid.uuid4().hex, model),
        spec,
        Ledger(max_running=spec.max_num_seqs, max_waiting=config.max_waiting),
        time.monotonic,
        {key: str(value) for key, value in asdict(config).items()},
        config.drain_s,
    )
    stop = asyncio.Event()

    def publish(update: EngineUpdate) -> None:
        loop.call_soon_threadsafe(service.dispatch, update)

    def failed(error: BaseException) -> None:
        process.failure = error
        loop.call_soon_threadsafe(give_up)

    def give_up() -> None:
        service.draining = True
        service.close_links()  # behind what the engine has published
        stop.set()

    engine = Engine(
        scheduler,
        runner,
        depth=config.depth,
        clock=time.monotonic,
        publish=publish,
        failed=failed,
    )
    process = WorkerProcess(port, service, engine, stop)
    service.connect(engine, scheduler.kv.pool.cached_hashes)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if handle_signals:
        _handle_signals(loop, stop)
    engine.start()
    await server.start()
    monitor = asyncio.create_task(_watch_health(health_servicer, process, config.stall_s))
    log.info(
        "worker ready",
        worker=name,
        listen=f"{config.listen.rpartition(':')[0]}:{port}",
        model=model.name,
        num_blocks=spec.num_blocks,
        kv_tokens=spec.num_blocks * spec.block_size,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
    )
    if ready is not None:
        ready(process)
    try:
        await stop.wait()
        if process.failure is None:
            log.info("draining", deadline_s=config.drain_s)
            ended_early = await service.drain(config.drain_s)
            log.info("drained", ended_early=ended_early)
    finally:
        monitor.cancel()
        await health_servicer.enter_graceful_shutdown()
        service.close_links()
        await server.stop(grace=1.0)
        if engine.stop(timeout_s=5.0):
            runner.close()
        if decisions is not None:
            decisions.close()
    if process.failure is not None:
        log.error("the engine failed", error=repr(process.failure))
        return 1
    return 0


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
    servicer: health.aio.HealthServicer, process: WorkerProcess, stall_s: float
) -> None:
    """Health is step progress while there is work, and tells the truth in both directions (faults
    B094, B095)."""
    current = None
    while True:
        stalled = process.engine.stalled_for_s() > stall_s
        serving = not stalled and not process.service.draining and process.failure is None
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        if status != current:
            current = status
            for name in ("", HEALTH_SERVICE):
                await servicer.set(name, status)
            if stalled:
                log.error("no step progress", stalled_s=process.engine.stalled_for_s())
        await asyncio.sleep(HEALTH_PERIOD_S)
