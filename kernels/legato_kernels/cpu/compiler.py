"""Compiles kernels.cpp with whatever compiler is there, once per source, compiler and CPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
VERSION = 1
"""What legato_kernels_version() of the source says."""
COMPILE_S = 120
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-w",
)


class KernelsUnavailable(Exception):
    """Why the kernels cannot be used here, in one line."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels; compiles them if they are not in the cache. Raises KernelsUnavailable.

    A library in the cache that does not load, or is of another version, is built again.
    """
    runtime = _openmp_runtime()
    compiler = _compiler()
    flags = [*FLAGS, _tuning(), *(["-fopenmp"] if runtime else [])]
    target = _cache_folder() / f"{_digest(compiler, flags)}.so"
    if runtime is not None:
        # Our threads are torch's own: two runtimes would spin against each other. The library is
        # linked without one and finds these symbols.
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    if target.exists():
        try:
            return _open(target)
        except (OSError, AttributeError, KernelsUnavailable):
            target.unlink()
    _build(compiler, flags, target)
    try:
        return _open(target)
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"the compiled kernels do not load: {error}") from None


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    if library.legato_kernels_version() != VERSION:
        raise KernelsUnavailable(f"{path} is of another version")
    return library


def _build(compiler: str, flags: list[str], target: Path) -> None:
    """Compiles aside and renames, so that the cache never holds half a library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        for command in (
            [compiler, *flags, "-c", str(SOURCE), "-o", str(built)],
            [compiler, "-shared", str(built), "-o", str(linked)],
        ):
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=COMPILE_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise KernelsUnavailable(f"{compiler}: {error}") from None
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise KernelsUnavailable(f"{compiler} failed: {lines[0]}")
        os.replace(linked, target)


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise KernelsUnavailable("no C++ compiler was found (c++, g++, clang++ or $CXX)")


def _tuning() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _digest(compiler: str, flags: list[str]) -> str:
    """Names the source, the compiler's version, and the CPU that -march=native stands for."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update("\0".join([version, *flags, platform.machine(), _cpu_features()]).encode())
    return digest.hexdigest()[:32]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _openmp_runtime() -> str | None:
    """Path of the OpenMP runtime that torch has loaded into this process; None = one thread."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            return path
    return None


def _cache_folder() -> Path:
    home = os.environ.get("LEGATO_HOME")
    root = Path(home).expanduser() if home else Path.home() / ".cache" / "legato"
    return root / "kernels"
