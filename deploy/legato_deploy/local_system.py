"""A router and workers as processes of this machine, watched together: ``legato up``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.client import Client
from rich.console import Console

from .ask import print_stream

START_S = 180.0
STOP_S = 45.0
TAIL_LINES = 15


class ProcessFailed(Exception):
    """A process of the system ended by itself; the text holds the end of its log."""


@dataclass(slots=True)
class Child:
    """A process, the address on which it serves, and the file its output goes to."""

    name: str
    address: str
    process: asyncio.subprocess.Process
    log: Path


@dataclass(slots=True)
class LocalSystem:
    """Owner of the processes it starts; :meth:`stop` ends them all."""

    model: str
    num_workers: int = 1
    port: int = 7070
    runner: str = "torch"
    config: Path | None = None
    verbose: bool = False
    worker_options: tuple[str, ...] = ()
    router_options: tuple[str, ...] = ()
    children: list[Child] = field(default_factory=list)
    logs: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="legato-")))

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"localhost:{self.port}"

    async def start(self) -> None:
        """Returns when router and workers are healthy. Raises ProcessFailed, TimeoutError, or
        ValueError for a port that is in use."""
        self.port = self.port or _free_port()
        _refuse_taken(self.port)  # else another router there would pass for ours
        common = ["--config", str(self.config)] if self.config else []
        addresses = [f"127.0.0.1:{_free_port()}" for _ in range(self.num_workers)]
        threads = max(1, len(os.sched_getaffinity(0)) // self.num_workers)
        for number, address in enumerate(addresses):
            await self._spawn(
                f"worker-{number}",
                address,
                [
                    *("worker", "--model", self.model, "--listen", address),
                    *("--runner", self.runner, "--worker-id", f"worker-{number}"),
                    *("--num-threads", str(threads)),
                    *common,
                    *self.worker_options,
                ],
            )
        workers = [part for address in addresses for part in ("--workers", address)]
        await self._spawn(
            "router",
            f"127.0.0.1:{self.port}",
            [
                *("router", "--models", self.model, "--listen", f"127.0.0.1:{self.port}"),
                *workers,
                *common,
                *self.router_options,
            ],
        )
        deadline = time.monotonic() + START_S
        for child in self.children:
            await self._until_healthy(child, deadline)

    async def wait(self) -> None:
        """Returns when a process ends; raises ProcessFailed."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self.children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            child = waits[done.pop()]
            raise ProcessFailed(_epitaph(child))
        finally:
            for task in waits:
                task.cancel()

    async def stop(self) -> None:
        """Asks all to end (router first, so that no request meets a missing worker), then insists.
        May be called again."""
        for child in reversed(self.children):
            if child.process.returncode is None:
                child.process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.process.wait(), STOP_S)
        for child in self.children:
            if child.process.returncode is None:
                child.process.kill()
                await child.process.wait()

    def kill(self) -> None:
        """Ends all at once, for whoever does not want to wait for :meth:`stop`."""
        for child in self.children:
            if child.process.returncode is None:
                child.process.kill()

    async def _spawn(self, name: str, address: str, arguments: list[str]) -> None:
        log = self.logs / f"{name}.log"
        out = None if self.verbose else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        environ = os.environ | {"LEGATO_ROUTER_RESUME_KEY": _resume_key()}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "legato_deploy",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environ,
            # A Ctrl-C on the terminal is for us alone: we end the others in order.
            start_new_session=True,
        )
        if out is not None:
            os.close(out)
        self.children.append(Child(name, address, process, log))

    async def _until_healthy(self, child: Child, deadline: float) -> None:
        while True:
            if child.process.returncode is not None:
                raise ProcessFailed(_epitaph(child))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{child.name} was not healthy after {START_S:.0f} s")
            if await healthy(child.address):
                return
            await asyncio.sleep(0.05)


async def healthy(address: str) -> bool:
    """Whether a gRPC health service at ``address`` says SERVING."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def run_up(system: LocalSystem, *, prompt: str, stay: bool) -> int:
    """``legato up``: start, ask, stay until a signal or a process ends. Returns the exit code."""
    console = Console(stderr=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            system.kill()  # asked twice: no more waiting
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal)
    try:
        return await _unless(stop, _up(system, console, prompt=prompt, stay=stay))
    except (ProcessFailed, TimeoutError) as error:
        console.print(f"legato: {error}", markup=False, highlight=False)
        return 1
    finally:
        with console.status("stopping..."):
            await system.stop()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, int]) -> int:
    """The work's result, or 0 as soon as ``stop`` is set."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return 0


async def _up(system: LocalSystem, console: Console, *, prompt: str, stay: bool) -> int:
    started = time.monotonic()
    what = f"{system.num_workers} worker" + ("s" if system.num_workers > 1 else "")
    with console.status(f"starting a router and {what} for {system.model}..."):
        await system.start()
    console.print(
        f"up after {time.monotonic() - started:.1f} s: router at {system.address}, {what}, "
        f"logs in {system.logs}",
        highlight=False,
    )
    if prompt:
        console.print(f"\n> {prompt}", markup=False, highlight=False)
        async with Client(system.address) as client:
            chat = [{"role": "user", "content": prompt}]
            models = await client.list_models()
            if models[0].has_chat_template:
                stream = client.stream(chat=chat, max_tokens=200)
            else:
                stream = client.stream(prompt, max_tokens=200)
            await print_stream(stream)
    legato = "legato" if shutil.which("legato") else os.path.relpath(sys.argv[0])
    console.print(
        "\nTry next, from another terminal:\n"
        f'  {legato} generate "Why is the sky blue?" -a {system.address}\n'
        f"  {legato} chat -a {system.address}\n"
        f"  {legato} models -a {system.address}\n"
        "From Python:\n"
        "  from legato.client import Client\n"
        f'  async with Client("{system.address}") as client:\n'
        '      async for delta in client.stream("Once upon a time", max_tokens=64): ...',
        markup=False,
        highlight=False,
    )
    if not stay:
        return 0
    console.print("\nCtrl-C ends all.", highlight=False)
    await system.wait()
    return 0


def _epitaph(child: Child) -> str:
    code = child.process.returncode
    try:
        tail = child.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        tail = []
    return "\n  ".join([f"{child.name} ended with exit code {code}:", *tail])


_KEY = secrets.token_hex(32)


def _resume_key() -> str:
    """One for all routers that this process starts."""
    return os.environ.get("LEGATO_ROUTER_RESUME_KEY", _KEY)


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} cannot be used ({error.strerror}); choose another with --port, or 0 "
                "for any free one"
            ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
