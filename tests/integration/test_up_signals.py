"""``legato up`` and what goes wrong around it: signals, a child that dies, a port that is taken. No
process outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from legato.client import Client

from tests import tiny_model
from tests.local_fleet import fleet, until
from tests.processes import ROOT, environment, free_port

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "tiny")


@dataclass
class Up:
    process: asyncio.subprocess.Process
    port: int

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    async def until_said(self, text: str) -> str:
        assert self.process.stderr is not None
        said = ""
        async with asyncio.timeout(60):
            while text not in said:
                piece = await self.process.stderr.read(4096)
                assert piece, said
                said += piece.decode()
        return said

    async def end(self, timeout_s: float = 20) -> tuple[int, str]:
        async with asyncio.timeout(timeout_s):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@contextlib.asynccontextmanager
async def up(model: Path, *arguments: str, port: int | None = None) -> AsyncIterator[Up]:
    port = free_port() if port is None else port
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "legato_deploy", "up", str(model), "--port", str(port)),
        *("--runner", "simulated", *arguments),
        cwd=ROOT,
        env=environment(LEGATO_WORKER_SIMULATED_VOCAB_SIZE=str(tiny_model.VOCAB_SIZE)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    started = Up(process, port)
    try:
        yield started
    finally:
        if process.returncode is None:
            for child in started.children():
                child.kill()
            process.kill()
            await process.wait()


def all_gone(children: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_all_although_a_client_is_served(
    model: Path, signum: signal.Signals
) -> None:
    """In mid-answer: the answer is finished first, then all processes end, with exit code 0."""
    async with up(model, "--stay", "--prompt", "") as system:
        await system.until_said("Ctrl-C ends all")
        children = system.children()
        assert len(children) == 2
        async with Client(f"127.0.0.1:{system.port}", max_resumes=0) as client:
            stream = client.stream(token_ids=[1], max_tokens=60, ignore_eos=True)
            await anext(stream)
            system.process.send_signal(signum)
            async for _ in stream:
                pass
            assert stream.finished is not None
            assert stream.finished.usage.completion_tokens == 60
        code, _ = await system.end()
        assert code == 0 and all_gone(children)


async def test_a_second_ctrl_c_does_not_wait(model: Path) -> None:
    """A client that never lets go holds the first one; the second ends everything."""
    async with up(model, "--stay", "--prompt", "") as system:
        await system.until_said("Ctrl-C ends all")
        children = system.children()
        async with Client(f"127.0.0.1:{system.port}", max_resumes=0) as client:
            stream = client.stream(token_ids=[1], max_tokens=4000, initial_credit=1)
            await anext(stream)
            system.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.5)
            assert system.process.returncode is None
            system.process.send_signal(signal.SIGINT)
            await system.end(5)
        assert all_gone(children)


async def test_a_signal_while_it_starts_leaves_nothing_behind(model: Path) -> None:
    async with up(model, "--stay", "--prompt", "", "--workers", "2") as system:
        await until(lambda: len(system.children()) == 3, 30)
        children = system.children()
        system.process.send_signal(signal.SIGINT)
        code, _ = await system.end()
        assert code == 0 and all_gone(children)


async def test_a_child_that_dies_ends_the_rest_and_says_which(model: Path) -> None:
    async with up(model, "--stay", "--prompt", "") as system:
        await system.until_said("Ctrl-C ends all")
        children = system.children()
        victim = next(c for c in children if "worker" in c.cmdline())
        os.kill(victim.pid, signal.SIGKILL)
        code, errors = await system.end()
        assert code == 1 and "worker-0 ended with exit code -9" in errors
        assert all_gone(children)


async def test_a_port_that_is_taken_is_refused_and_not_mistaken_for_ours(
    model: Path, model_dir: Path
) -> None:
    """A router that already runs there is healthy, and is another one."""
    async with fleet(model_dir) as running, up(model, port=running.routers[0].port) as system:
        code, errors = await system.end()
        assert code == 2
        assert errors.startswith("legato: port") and "--port" in errors
        assert "Traceback" not in errors
