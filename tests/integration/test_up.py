"""``legato up``: a whole system from one command, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests import tiny_model

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "tiny", chat=True)


def up(model: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "legato_deploy", "up", str(model), "--port", "0"]
    environ = os.environ | {
        "LEGATO_WORKER_SIMULATED_VOCAB_SIZE": str(tiny_model.VOCAB_SIZE),
        "LEGATO_WORKER_SIMULATED_BASE_MS": "20",
    }
    return subprocess.Popen(
        [*command, "--runner", "simulated", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environ,
    )


def test_it_answers_token_by_token_and_ends_cleanly(chat_model: Path) -> None:
    """The first token is printed long before the last is computed (200 tokens of 20 ms each)."""
    process = up(chat_model, "--workers", "2")
    assert process.stdout is not None and process.stderr is not None
    stamps = []
    while os.read(process.stdout.fileno(), 64):
        stamps.append(time.monotonic())
    errors = process.stderr.read().decode()
    assert process.wait(30) == 0, errors
    assert len(stamps) > 5, errors
    assert stamps[-1] - stamps[0] > 0.2, "the answer came in one piece"
    assert "Try next" in errors and "up after" in errors


def test_one_ctrl_c_ends_all(chat_model: Path) -> None:
    process = up(chat_model, "--stay", "--prompt", "")
    assert process.stderr is not None
    seen = b""
    while b"Ctrl-C ends all" not in seen:
        piece = os.read(process.stderr.fileno(), 4096)
        assert piece, seen
        seen += piece
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_a_worker_that_cannot_start_is_told_with_its_log(chat_model: Path) -> None:
    process = up(chat_model, "--prompt", "", "--config", "/nowhere.yaml")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"worker-0 ended with exit code 2" in errors and b"/nowhere.yaml" in errors
