"""Routers and workers as processes of their own, for what only a process can show: signals, exit
codes, and death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from legato_deploy.local_system import healthy

from tests.tiny_model import VOCAB_SIZE

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = ("protos", "router", "worker", "kernels", "deploy", ".")
START_S = 60.0


def environment(**extra: str) -> dict[str, str]:
    """This environment, with the product importable and none of its settings."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("LEGATO_")}
    path = os.pathsep.join(str(ROOT / part) for part in IMPORTS)
    return own | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | extra


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Child:
    """A process and the port on which it serves. Its output is in ``log``."""

    process: asyncio.subprocess.Process
    port: int
    log: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    async def exit_code(self, timeout_s: float = 20.0) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    async def until_healthy(self) -> None:
        async with asyncio.timeout(START_S):
            while not await healthy(self.address):
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def child(folder: Path, *arguments: str, port: int) -> AsyncIterator[Child]:
    """Runs this Python with ``arguments``; the process does not outlive the block."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{port}.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=ROOT,
            env=environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    started = Child(process, port, log)
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def worker(
    folder: Path, model_dir: Path, *options: str
) -> contextlib.AbstractAsyncContextManager[Child]:
    """A worker with a simulated runner; not yet healthy."""
    port = free_port()
    return child(
        folder,
        *("-m", "legato_deploy", "worker", "--model", str(model_dir), "--runner", "simulated"),
        *("--simulated-vocab-size", str(VOCAB_SIZE), "--simulated-base-ms", "2"),
        *("--listen", f"127.0.0.1:{port}", "--worker-id", f"process-{port}"),
        *options,
        port=port,
    )


def router(
    folder: Path, model_dir: Path, workers: Sequence[str], *options: str
) -> contextlib.AbstractAsyncContextManager[Child]:
    """A router; not yet healthy. All routers of these tests share their resume key."""
    port = free_port()
    addresses = [part for address in workers for part in ("--workers", address)]
    return child(
        folder,
        *("-m", "legato_deploy", "router", "--models", str(model_dir)),
        *("--listen", f"127.0.0.1:{port}", "--resume-key", "k" * 32),
        *addresses,
        *options,
        port=port,
    )
