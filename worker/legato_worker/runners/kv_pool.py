"""How many KV blocks a worker gets, and their memory."""

from __future__ import annotations

from pathlib import Path

import torch
from legato_kernels.paged import PagedKV

from ..models.base import KVLayout

_SHARE = 0.5
"""Of the memory that is free when the model has been loaded. The rest is for activations, the page
cache that holds mapped weights, and other processes of the machine."""

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


class KVMemoryError(RuntimeError):
    """The KV pool does not fit into memory; the message holds the numbers."""


def num_kv_blocks(
    layout: KVLayout,
    block_size: int,
    *,
    num_blocks: int | None,
    kv_memory_bytes: int | None,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """``num_blocks`` if given; else the blocks that fit into ``kv_memory_bytes`` (None: a share of
    what is free), but no more than ``max_num_seqs`` sequences of ``max_model_len`` tokens can use.

    Raises :class:`KVMemoryError` when not even one fits, or the pool would not fit into memory.
    """
    block_bytes = layout.token_bytes * block_size
    block = f"one KV block of {block_size} tokens takes {block_bytes:,} bytes"
    available = available_memory_bytes()
    if num_blocks is None:
        budget = int(available * _SHARE) if kv_memory_bytes is None else kv_memory_bytes
        if budget < block_bytes:
            source = f"{_SHARE:.0%} of the free" if kv_memory_bytes is None else "the given KV"
            raise KVMemoryError(f"{source} memory is {budget:,} bytes, but {block}")
        usable = max_num_seqs * -(-max_model_len // block_size)
        num_blocks = min(budget // block_bytes, usable)
    if num_blocks * block_bytes > available:
        raise KVMemoryError(
            f"{num_blocks:,} KV blocks need {num_blocks * block_bytes:,} bytes ({block}), but only "
            f"{available:,} bytes of memory are free"
        )
    return num_blocks


def allocate_kv(layout: KVLayout, block_size: int, num_blocks: int) -> PagedKV:
    """The pool, uninitialised. The system commits its memory as blocks are first written: an idle
    worker starts at once and takes little, however large its pool."""
    shape = (num_blocks, block_size, layout.num_kv_heads, layout.head_dim)

    def caches() -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=layout.dtype) for _ in range(layout.num_layers)]

    return PagedKV(keys=caches(), values=caches())


def available_memory_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Memory that this process can still take: of the machine, or of its container if that is
    less. Page cache that the kernel would give back counts as free."""
    available = [_meminfo_available(proc)]
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),  # cgroup 2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # cgroup 1
    ):
        limit, usage = _number(cgroup / limit_file), _number(cgroup / usage_file)
        if limit is not None and usage is not None:
            reclaimable = _inactive_file((cgroup / limit_file).with_name("memory.stat"))
            available.append(max(0, limit - usage + reclaimable))
    return min(available)


def _meminfo_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KVMemoryError("/proc/meminfo tells no MemAvailable; give the KV memory in bytes")


def _number(path: Path) -> int | None:
    """None where there is no such limit ("max") or no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
