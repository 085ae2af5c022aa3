"""How a model enters the store: made aside by one process at a time, then renamed into place."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from legato_deploy.store.errors import StoreError

_ASIDE = ".aside-"  # never a model name: those begin with a letter or digit
_SPARE_BYTES = 64 << 20  # left free on top of what a pull is known to need


@dataclass(frozen=True, slots=True)
class Workspace:
    """Two empty folders on the store's disk: one becomes the model, the other is thrown away."""

    model: Path
    scratch: Path


@contextmanager
def exclusive(root: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the store's one lock, waiting for it as long as need be. The kernel releases it also
    when its holder is killed."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "pull.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another pull is at work in this store; waiting for it to end.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def publishing(models: Path, name: str) -> Iterator[Workspace]:
    """Yields a workspace and, when the block ends without an error, makes its model folder
    ``models/NAME``, in place of a damaged one if there is one. After an error nothing remains.

    The caller holds the lock, so whatever lies aside was left by a process that died: it goes.
    """
    models.mkdir(parents=True, exist_ok=True)
    for stale in models.glob(f"{_ASIDE}*"):
        shutil.rmtree(stale)
    aside = models / f"{_ASIDE}{name}"
    workspace = Workspace(aside / "model", aside / "scratch")
    try:
        workspace.model.mkdir(parents=True)
        workspace.scratch.mkdir()
        yield workspace
        for path in workspace.model.iterdir():
            _fsync(path)
        _fsync(workspace.model)
        if (models / name).exists():
            (models / name).rename(aside / "replaced")
        workspace.model.rename(models / name)
        _fsync(models)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises StoreError unless the disk of ``folder`` has room for ``num_bytes`` and some spare."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        needed_mb, free_mb = -(-(num_bytes + _SPARE_BYTES) // 10**6), free // 10**6
        raise StoreError(
            f"Too little space: this needs {needed_mb:,} MB and {folder} has {free_mb:,} MB free. "
            "Free some, or set LEGATO_HOME to a folder on a larger disk."
        )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
