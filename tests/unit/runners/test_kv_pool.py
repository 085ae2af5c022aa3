"""The size of the KV pool: what is asked for, what fits, and what is refused with its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from legato_worker.models.base import KVLayout
from legato_worker.runners import kv_pool
from legato_worker.runners.kv_pool import (
    KVMemoryError,
    allocate_kv,
    available_memory_bytes,
    num_kv_blocks,
)

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
BLOCK_BYTES = 2 * 3 * 2 * 8 * 2 * 16  # K and V, layers, heads, size, bytes, tokens
GIB = 1 << 30


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 blocks and a bit."""
    monkeypatch.setattr(kv_pool, "available_memory_bytes", lambda: 100 * BLOCK_BYTES + 5)


def blocks(
    num_blocks: int | None = None, kv_memory_bytes: int | None = None, max_model_len: int = 1600
) -> int:
    return num_kv_blocks(
        LAYOUT,
        16,
        num_blocks=num_blocks,
        kv_memory_bytes=kv_memory_bytes,
        max_num_seqs=2,
        max_model_len=max_model_len,
    )


@pytest.mark.usefixtures("free_memory")
def test_sizes() -> None:
    assert blocks() == 50, "half of what is free"
    assert blocks(kv_memory_bytes=7 * BLOCK_BYTES - 1) == 6
    assert blocks(kv_memory_bytes=99 * BLOCK_BYTES) == 99
    assert blocks(num_blocks=100) == 100
    assert blocks(max_model_len=33) == 6, "two sequences of three blocks use no more"
    assert blocks(num_blocks=20, max_model_len=33) == 20, "an explicit number is kept"


@pytest.mark.usefixtures("free_memory")
@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"kv_memory_bytes": BLOCK_BYTES - 1}, ["3,071 bytes", "16 tokens takes 3,072 bytes"]),
        ({"num_blocks": 101}, ["101 KV blocks need 310,272 bytes", "only 307,205 bytes"]),
        ({"kv_memory_bytes": 1 << 60}, ["200 KV blocks need 614,400 bytes"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    arguments: dict[str, int], numbers: list[str]
) -> None:
    with pytest.raises(KVMemoryError) as raised:
        blocks(**arguments)
    for number in numbers:
        assert number in str(raised.value)


def test_no_free_memory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "available_memory_bytes", lambda: 2 * BLOCK_BYTES - 2)
    with pytest.raises(KVMemoryError, match="50% of the free memory is 3,071 bytes"):
        blocks()


def test_the_pool_is_what_was_counted() -> None:
    kv = allocate_kv(LAYOUT, 16, 5)
    caches = [*kv.keys, *kv.values]
    assert sum(cache.nbytes for cache in caches) == 5 * BLOCK_BYTES == 5 * 16 * LAYOUT.token_bytes
    assert kv.block_size == 16
    assert len({cache.data_ptr() for cache in caches}) == 6


def system(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """(proc, cgroup) with 8 GiB available on the machine."""
    for name, text in {"proc/meminfo": f"MemFree: 1 kB\nMemAvailable: {8 << 20} kB\n"}.items():
        files = {name: text} | files
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "proc", folder / "cgroup"


def test_memory_of_the_machine(tmp_path: Path) -> None:
    assert available_memory_bytes(*system(tmp_path, {})) == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 8 * GIB), (str(4 * GIB), 2 * GIB), (str(GIB), 0)]
)
def test_memory_of_a_container(limit: str, expected: int, tmp_path: Path) -> None:
    """cgroup 2: 3 GiB in use, of which 1 GiB is page cache that can be given back."""
    files = {
        "cgroup/memory.max": f"{limit}\n",
        "cgroup/memory.current": f"{3 * GIB}\n",
        "cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
    }
    assert available_memory_bytes(*system(tmp_path, files)) == expected


def test_memory_of_a_container_of_the_old_kind(tmp_path: Path) -> None:
    files = {
        "cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
        "cgroup/memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB}\n",
    }
    assert available_memory_bytes(*system(tmp_path, files)) == 2 * GIB


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 1 << 20
