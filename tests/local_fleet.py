"""A fleet inside the test's own event loop: real sockets, real links, simulated or real runners."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import grpc
from legato.client import Client
from legato.endpoints import CHANNEL_OPTIONS
from legato.v1 import inference_pb2_grpc, worker_pb2_grpc
from legato_router import serve as router_serve
from legato_router.config import RouterConfig
from legato_router.worker_link import WorkerLink
from legato_worker import serve as worker_serve
from legato_worker.config import WorkerConfig
from legato_worker.runners.base import Runner
from legato_worker.runners.simulated import Fault, SimulatedRunner

from tests.tiny_model import VOCAB_SIZE
from tests.wire import Wire

START_S = 60.0
KEY = "a key that all test routers share"
MODEL = "tiny"

_Process = TypeVar("_Process")
Load = Callable[[WorkerConfig, worker_serve.ModelSource], Runner]


def with_faults(*faults: Fault) -> Load:
    """A loader of a simulated runner that fails as scripted."""

    def load(config: WorkerConfig, source: worker_serve.ModelSource) -> Runner:
        simulated = worker_serve.simulated_config(config)
        return SimulatedRunner(replace(simulated, faults=faults), time.sleep)

    return load


@dataclass
class Fleet:
    """Running routers and workers. ``wires[i]`` is what leads from all routers to worker i."""

    model_dir: Path
    fingerprint: str
    routers: list[router_serve.RouterProcess] = field(default_factory=list)
    workers: list[worker_serve.WorkerProcess] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    tasks: dict[int, asyncio.Task[int]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """All routers, for a client."""
        return ",".join(f"localhost:{router.port}" for router in self.routers)

    def client(self, **options: object) -> Client:
        return Client(self.address, **options)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def stub(
        self, number: int = 0, options: Sequence[tuple[str, int]] = ()
    ) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
        """The public service of a router, without a client around it."""
        target = f"127.0.0.1:{self.routers[number].port}"
        async with grpc.aio.insecure_channel(target, [*CHANNEL_OPTIONS, *options]) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    @contextlib.asynccontextmanager
    async def worker_stub(self, number: int = 0) -> AsyncIterator[worker_pb2_grpc.WorkerStub]:
        """The internal service of a worker."""
        target = f"127.0.0.1:{self.workers[number].port}"
        async with grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) as channel:
            yield worker_pb2_grpc.WorkerStub(channel)

    def links(self) -> list[WorkerLink]:
        return [link for router in self.routers for link in router.links]

    def lose(self, number: int) -> None:
        """Worker ``number`` is gone, as the routers see it."""
        self.wires[number].close()

    async def exit_code(self, process: object) -> int:
        """Of a router or worker that ends."""
        async with asyncio.timeout(30):
            return await self.tasks[id(process)]

    def num_steps(self) -> int:
        return sum(worker.engine._scheduler.step for worker in self.workers)

    def held(self) -> list[str]:
        """What routers and workers still hold of requests; empty when all is given back."""
        found = []
        for number, worker in enumerate(self.workers):
            scheduler, service = worker.engine._scheduler, worker.service
            if scheduler.has_work or scheduler.kv.pool.num_used:
                found.append(f"worker {number}: the scheduler has work")
            if len(service._ledger) or service._ledger.promised_blocks or service._routes:
                found.append(f"worker {number}: ledger or routes are not empty")
            if any(link.keys or link.partial for link in service._links):
                found.append(f"worker {number}: a link knows requests")
        for number, router in enumerate(self.routers):
            if router.service.num_requests:
                found.append(f"router {number}: holds requests")
            for link in router.links:
                view = link.view
                if link.num_attempts or (view and (view.unapplied_blocks or view.unapplied)):
                    found.append(f"router {number}: the link to {link.worker_id} holds attempts")
            room = router.service._dispatcher._room
            if len(room) or room.num_tokens:
                found.append(f"router {number}: requests wait")
        return found

    async def until_idle(self, timeout_s: float = 10.0) -> None:
        """All KV is free again everywhere, and no one remembers a request."""
        await until(lambda: not self.held(), timeout_s, lambda: str(self.held()))
        for worker in self.workers:
            worker.engine._scheduler.check()


async def until(
    condition: Callable[[], bool],
    timeout_s: float = 10.0,
    describe: Callable[[], str] = lambda: "it never came true",
) -> None:
    """Waits until ``condition`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, describe()
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def fleet(
    model_dir: Path,
    *,
    num_workers: int = 1,
    num_routers: int = 1,
    worker: Mapping[str, object] | None = None,
    router: Mapping[str, object] | None = None,
    load: Load = worker_serve.build_runner,
    other_workers: Sequence[str] = (),
    fingerprint: str = "fingerprint",
) -> AsyncIterator[Fleet]:
    """Runs a fleet that serves ``model_dir`` (a folder with at least a tokenizer.json) under the
    name ``tiny``. ``worker`` and ``router`` override settings. ``other_workers``: addresses of
    workers that run elsewhere; they serve a model of this name and ``fingerprint``."""
    running = Fleet(model_dir, fingerprint)
    settings: dict[str, object] = {
        "runner": "simulated",
        "simulated_vocab_size": VOCAB_SIZE,
        "simulated_base_ms": 1.0,
        "simulated_per_token_us": 0.0,
        "drain_s": 5.0,
    }
    settings.update(worker or {})
    options: dict[str, object] = {"resume_key": KEY, "drain_s": 5.0, **(router or {})}
    try:
        for number in range(num_workers):
            config = WorkerConfig(
                listen="127.0.0.1:0",
                worker_id=f"w{number}",
                model=MODEL,
                **settings,  # type: ignore[arg-type]
            )
            process = await _start_worker(running, config, load)
            running.workers.append(process)
            wire = Wire(process.port)
            await wire.open()
            running.wires.append(wire)
        addresses = (*(wire.address for wire in running.wires), *other_workers)
        for number in range(num_routers):
            router_config = RouterConfig(
                listen="127.0.0.1:0",
                router_id=f"r{number}",
                workers=addresses,
                models=(MODEL,),
                **options,  # type: ignore[arg-type]
            )
            running.routers.append(await _start_router(running, router_config))
        await until(lambda: all(link.view for link in running.links()), START_S)
        yield running
    finally:
        for router_process in running.routers:
            router_process.stop.set()
        for worker_process in running.workers:
            worker_process.stop.set()
        await asyncio.gather(*running.tasks.values(), return_exceptions=True)
        for wire in running.wires:
            wire.close()


async def _start_worker(
    running: Fleet, config: WorkerConfig, load: Load
) -> worker_serve.WorkerProcess:
    started: asyncio.Future[worker_serve.WorkerProcess] = asyncio.get_running_loop().create_future()
    source = worker_serve.ModelSource(MODEL, running.model_dir, running.fingerprint)
    task = asyncio.create_task(
        worker_serve.serve(
            config, source, load=load, ready=started.set_result, handle_signals=False
        )
    )
    process = await _started(task, started)
    running.tasks[id(process)] = task
    return process


async def _start_router(running: Fleet, config: RouterConfig) -> router_serve.RouterProcess:
    started: asyncio.Future[router_serve.RouterProcess] = asyncio.get_running_loop().create_future()
    source = router_serve.ModelSource(MODEL, running.model_dir, running.fingerprint)
    task = asyncio.create_task(
        router_serve.serve(config, [source], ready=started.set_result, handle_signals=False)
    )
    process = await _started(task, started)
    running.tasks[id(process)] = task
    return process


async def _started(task: asyncio.Task[int], started: asyncio.Future[_Process]) -> _Process:
    await asyncio.wait((started, task), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    return started.result()
