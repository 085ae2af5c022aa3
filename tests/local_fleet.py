"""A fleet inside the test's own event loop: real sockets, real links, simulated or real runners."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from legato.client import Client
from legato_router import serve as router_serve
from legato_router.config import RouterConfig
from legato_worker import serve as worker_serve
from legato_worker.config import WorkerConfig

START_S = 60.0
KEY = "a key that all test routers share"


@dataclass
class Fleet:
    """Running routers and workers; ``address`` names all routers, for a client."""

    routers: list[router_serve.RouterProcess] = field(default_factory=list)
    workers: list[worker_serve.WorkerProcess] = field(default_factory=list)
    tasks: list[asyncio.Task[int]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return ",".join(f"localhost:{router.port}" for router in self.routers)

    def client(self, **options: object) -> Client:
        return Client(self.address, **options)  # type: ignore[arg-type]

    async def until_idle(self, timeout_s: float = 10.0) -> None:
        """All KV is free again everywhere, and no one remembers a request."""

        def busy() -> list[str]:
            found = []
            for worker in self.workers:
                scheduler = worker.engine._scheduler
                if scheduler.has_work or scheduler.kv.pool.num_used:
                    found.append("a scheduler has work")
                if len(worker.service._ledger) or worker.service._routes:
                    found.append("a ledger or route table is not empty")
            for router in self.routers:
                if router.service.num_requests or any(link.num_attempts for link in router.links):
                    found.append("a router holds requests")
            return found

        deadline = asyncio.get_running_loop().time() + timeout_s
        while busy():
            assert asyncio.get_running_loop().time() < deadline, busy()
            await asyncio.sleep(0.01)
        for worker in self.workers:
            worker.engine._scheduler.check()


@contextlib.asynccontextmanager
async def fleet(
    model_dir: Path,
    *,
    num_workers: int = 1,
    num_routers: int = 1,
    worker: dict[str, object] | None = None,
    router: dict[str, object] | None = None,
) -> AsyncIterator[Fleet]:
    """Runs a fleet that serves ``model_dir`` (a folder with at least a tokenizer.json)."""
    running = Fleet()
    settings: dict[str, object] = {
        "runner": "simulated",
        "simulated_base_ms": 1.0,
        "simulated_per_token_us": 0.0,
        "drain_s": 5.0,
    }
    settings |= worker or {}
    try:
        for number in range(num_workers):
            config = WorkerConfig(
                listen="127.0.0.1:0", worker_id=f"w{number}", model="tiny", **settings  # type: ignore[arg-type]
            )
            source = worker_serve.ModelSource("tiny", model_dir, "fingerprint")
            running.workers.append(await _start_worker(running, config, source))
        addresses = tuple(f"127.0.0.1:{w.port}" for w in running.workers)
        for number in range(num_routers):
            options: dict[str, object] = {"resume_key": KEY, "drain_s": 5.0} | (router or {})
            router_config = RouterConfig(
                listen="127.0.0.1:0",
                router_id=f"r{number}",
                workers=addresses,
                models=("tiny",),
                **options,  # type: ignore[arg-type]
            )
            running.routers.append(await _start_router(running, router_config, model_dir))
        await _attached(running)
        yield running
    finally:
        for process in (*running.routers, *running.workers):
            process.stop.set()
        await asyncio.gather(*running.tasks, return_exceptions=True)


async def _start_worker(
    running: Fleet, config: WorkerConfig, source: worker_serve.ModelSource
) -> worker_serve.WorkerProcess:
    started: asyncio.Future[worker_serve.WorkerProcess] = (
        asyncio.get_running_loop().create_future()
    )
    task = asyncio.create_task(
        worker_serve.serve(config, source, ready=started.set_result, handle_signals=False)
    )
    running.tasks.append(task)
    await asyncio.wait((started, task), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    return started.result()


async def _start_router(
    running: Fleet, config: RouterConfig, model_dir: Path
) -> router_serve.RouterProcess:
    started: asyncio.Future[router_serve.RouterProcess] = (
        asyncio.get_running_loop().create_future()
    )
    source = router_serve.ModelSource("tiny", model_dir, "fingerprint")
    task = asyncio.create_task(
        router_serve.serve(config, [source], ready=started.set_result, handle_signals=False)
    )
    running.tasks.append(task)
    await asyncio.wait((started, task), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    return started.result()


async def _attached(running: Fleet) -> None:
    async with asyncio.timeout(START_S):
        while any(link.view is None for router in running.routers for link in router.links):
            await asyncio.sleep(0.005)
