"""Settings: precedence, refusal of what is unknown, and a command line that teaches."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from legato_deploy.settings import SettingsError, load
from legato_router.config import HELP as ROUTER_HELP, RouterConfig
from legato_worker.config import HELP as WORKER_HELP, WorkerConfig


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "legato.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_environment_and_environment_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "worker: {max_num_seqs: 2, dtype: float32, block_size: 8}")
    environ = {"LEGATO_WORKER_MAX_NUM_SEQS": "3", "LEGATO_WORKER_BLOCK_SIZE": "4", "OTHER": "x"}
    flags = {"max_num_seqs": 5, "block_size": None}
    config = load(WorkerConfig, "worker", flags, file=file, environ=environ)
    assert (config.max_num_seqs, config.block_size, config.dtype) == (5, 4, "float32")
    assert config.capacity == WorkerConfig().capacity


def test_lists_come_from_everywhere(tmp_path: Path) -> None:
    file = write(tmp_path, "router: {workers: [a:1, b:2]}")
    assert load(RouterConfig, "router", {}, file=file, environ={}).workers == ("a:1", "b:2")
    environ = {"LEGATO_ROUTER_WORKERS": "c:3,d:4"}
    assert load(RouterConfig, "router", {}, file=file, environ=environ).workers == ("c:3", "d:4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker: {max_num_seq: 2}", "unknown setting 'max_num_seq' of worker"),
        ("workers: {max_num_seqs: 2}", "unknown section 'workers'"),
        ("worker: {max_num_seqs: many}", "worker.max_num_seqs = 'many'"),
        ("worker: {max_num_seqs: 0}", "max_num_seqs must be at least 1 and finite, not 0"),
        ("worker: {max_num_seqs: true}", "worker.max_num_seqs = True: must not be true or false"),
        ("worker: {depth: 2}", "depth must be 0 or 1, not 2"),
        ("worker: {drain_s: .nan}", "drain_s must be at least 0 and finite, not nan"),
        ("worker: {slow_reader_s: .inf}", "slow_reader_s must be at least 0 and finite"),
        ("worker: {stall_s: -1}", "stall_s must be at least 0"),
        ("worker: {listen: 7071}", "worker.listen = 7071"),
        ("worker: {prefix_cache: 3}", "worker.prefix_cache = 3"),
        ("[1, 2]", "must be a mapping of sections"),
        ("worker: {capacity: hope}", "capacity must be one of on_demand, reserve, not 'hope'"),
        ("worker: [1]", "section 'worker' must be a mapping"),
        ("worker: {max_num_seqs: 600}", "max_num_batched_tokens must be at least 600"),
        (": : :", "legato.yaml"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(WorkerConfig, "worker", {}, file=write(tmp_path, text), environ={})
    assert message in str(caught.value)


def test_an_unknown_environment_setting_is_refused() -> None:
    with pytest.raises(SettingsError, match="environment: unknown setting 'max_seqs'"):
        load(WorkerConfig, "worker", {}, file=None, environ={"LEGATO_WORKER_MAX_SEQS": "1"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router: {workers: a:1}", "router.workers = 'a:1'"),
        ("router: {workers: []}", "workers must name at least one address"),
        ("router: {models: []}", "models must name at least one model"),
        ("router: {window_tokens: 0}", "window_tokens must be at least 1"),
        ("router: {max_queue_s: .inf}", "max_queue_s must be finite"),
        ("router: {resume_key: short}", "resume_key must have at least 16 characters"),
    ],
)
def test_what_a_router_cannot_use_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(RouterConfig, "router", {}, file=write(tmp_path, text), environ={})
    assert message in str(caught.value)


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting() -> None:
    """A Service named legato-router would else keep every pod of its namespace from starting."""
    environ = {
        "LEGATO_ROUTER_SERVICE_HOST": "10.0.0.1",
        "LEGATO_ROUTER_SERVICE_PORT": "7070",
        "LEGATO_ROUTER_SERVICE_PORT_GRPC": "7070",
        "LEGATO_ROUTER_PORT": "tcp://10.0.0.1:7070",
        "LEGATO_ROUTER_PORT_7070_TCP": "tcp://10.0.0.1:7070",
        "LEGATO_ROUTER_PORT_7070_TCP_ADDR": "10.0.0.1",
        "LEGATO_ROUTER_DRAIN_S": "7",
    }
    assert load(RouterConfig, "router", {}, file=None, environ=environ) == RouterConfig(drain_s=7)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        load(WorkerConfig, "worker", {}, file=tmp_path / "nowhere.yaml", environ={})


@pytest.mark.parametrize(
    ("config", "help_texts"), [(WorkerConfig, WORKER_HELP), (RouterConfig, ROUTER_HELP)]
)
def test_every_setting_has_help(config: type, help_texts: dict[str, str]) -> None:
    assert set(help_texts) == {field.name for field in dataclasses.fields(config)}


def legato(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "legato_deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "command", [(), ("up",), ("router",), ("worker",), ("generate",), ("chat",), ("pull",)]
)
def test_help_of_every_command(command: tuple[str, ...]) -> None:
    result = legato(*command, "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout and len(result.stdout.splitlines()) > 8


def test_errors_of_use_are_one_line_and_exit_2(tmp_path: Path) -> None:
    file = write(tmp_path, "worker: {max_num_seq: 2}")
    result = legato("worker", "--config", str(file))
    assert result.returncode == 2
    assert result.stderr.startswith("legato: ") and "Traceback" not in result.stderr
    open_listener = legato("worker", "--listen", "0.0.0.0:7071", "--runner", "simulated")
    assert open_listener.returncode == 2
    assert "allow_open" in open_listener.stderr


def test_importing_the_client_router_and_core_leaves_torch_out() -> None:
    code = (
        "import sys\n"
        "import legato.client\n"
        "bad = {'torch', 'numpy', 'transformers', 'structlog', 'redis'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "import legato_worker.core.scheduler, legato_worker.runners.simulated\n"
        "bad = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "import legato_router.serve, legato_worker.serve, legato_deploy.cli\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
