"""Hub models, with the real huggingface_hub against a hub on this machine, and with none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from legato_deploy.store import ModelStore
from safetensors.numpy import save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": json.dumps({"model_type": "llama", "auto_map": {"AutoConfig": "evil.C"}}),
    "tokenizer.json": "{}",
    "model.safetensors": save({"w": np.arange(1000, dtype=np.float32)}),
    "pytorch_model.bin": "pickle",
    "evil.py": "raise SystemExit",
    "onnx/config.json": "{}",
    "consolidated.safetensors": "other format",
}
CONTENT = {name: data if isinstance(data, bytes) else data.encode() for name, data in FILES.items()}
PULL = """
    import pathlib, sys
    from rich.console import Console
    from legato_deploy.store import ModelStore, StoreError, console_progress, pull
    with console_progress(Console(width=1000)) as progress:
        try: pull(ModelStore(pathlib.Path(sys.argv[1])), sys.argv[2], progress)
        except StoreError as error: print(error)
"""


class Hub(ThreadingHTTPServer):
    """One repository, org/Tiny, as the hub's HTTP interface shows it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.fetched: list[str] = []


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Hub)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/Tiny/revision/"):
            siblings = [{"rfilename": name} for name in CONTENT]
            self._json({"id": "org/Tiny", "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/org/Tiny/tree/{COMMIT}":
            self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": COMMIT}
                    for name, data in CONTENT.items()
                ]
            )
        elif path.startswith(f"/org/Tiny/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/org/Tiny/resolve/{COMMIT}/")
            if self.command == "GET":
                self.server.fetched.append(name)
            digest = hashlib.sha256(CONTENT[name]).hexdigest()
            self._answer(200, CONTENT[name], {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "legato")


def run_pull(store: ModelStore, what: str, endpoint: str, **env: str) -> str:
    """In a process of its own: huggingface_hub reads its settings when imported."""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(store.root.parent / "hf"),
        "PYTHONPATH": str(Path(__file__).parents[2] / "deploy"),
        **env,
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PULL), str(store.root), what],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_data_files_of_a_hub_model_are_stored_and_no_others(hub: Hub, store: ModelStore) -> None:
    """B110, B112"""
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    assert "tiny is ready" in run_pull(store, "org/Tiny", endpoint)
    wanted = {"config.json", "tokenizer.json", "model.safetensors"}
    assert set(hub.fetched) == wanted
    stored = store.verify("tiny")
    assert {path.name for path in stored.path.iterdir()} == wanted | {"legato.json"}
    assert (stored.path / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]
    manifest = json.loads((stored.path / "legato.json").read_text())
    assert manifest["source"] == f"org/Tiny@{COMMIT}"


def test_present_hub_model_asks_no_network(hub: Hub, store: ModelStore) -> None:
    run_pull(store, "org/Tiny", f"http://127.0.0.1:{hub.server_port}")
    nowhere = "http://127.0.0.1:9"
    assert "already" in run_pull(store, "org/Tiny", nowhere)
    assert "already" in run_pull(store, f"org/Tiny@{COMMIT}", nowhere)
    assert "another model called tiny" in run_pull(store, "other/Tiny", nowhere)
    assert "another model called tiny" in run_pull(store, "org/Tiny@v2", nowhere)


def test_offline_is_told_and_stores_nothing(store: ModelStore) -> None:
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        said = run_pull(store, "org/Tiny", "http://127.0.0.1:9", **env)
        assert "cannot be reached" in said and "legato pull FOLDER" in said, said
    assert store.list() == [] and not list(store.models.iterdir())


def test_unknown_repository_is_told(hub: Hub, store: ModelStore) -> None:
    said = run_pull(store, "org/Nothing", f"http://127.0.0.1:{hub.server_port}")
    assert "no public model org/Nothing" in said


@pytest.mark.parametrize("what", ["org/../x", "a/b/c", "org/", "https://x.org/a/b", "org/Tiny@a b"])
def test_what_is_no_hub_id_asks_no_network(store: ModelStore, what: str) -> None:
    """B115"""
    said = run_pull(store, what, "http://127.0.0.1:9")
    assert "is no Hugging Face id" in said or "not a model name" in said, said
