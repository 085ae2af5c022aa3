"""The compiled kernels against the oracle, over a pool whose unowned slots hold NaN (B032)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from legato_kernels import reference
from legato_kernels.cpu import KernelsUnavailable, compiler, load_library
from legato_kernels.paged import PagedStep

try:
    load_library()
except KernelsUnavailable as error:
    pytest.skip(f"no kernels here: {error}", allow_module_level=True)

from legato_kernels import cpu

BLOCK = 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def paged_rows(
    rows: list[tuple[int, int]], num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[PagedStep, torch.Tensor, torch.Tensor]:
    """Rows of (context length, query length) with scattered blocks in a pool of NaN."""
    generator = torch.Generator().manual_seed(len(rows))
    num_blocks = [-(-context // BLOCK) for context, _ in rows]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    tables = torch.full((len(rows), max(num_blocks) + 1), 1 << 30, dtype=torch.int32)
    shape = (len(order), BLOCK, num_kv_heads, head_dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    positions, query_start = [], [0]
    for row, (context, queries) in enumerate(rows):
        for index in range(num_blocks[row]):
            block = tables[row, index] = order.pop()
            used = min(BLOCK, context - index * BLOCK)
            keys[block, :used] = torch.randn((used, *shape[2:]), generator=generator)
            values[block, :used] = torch.randn((used, *shape[2:]), generator=generator)
        positions += range(context - queries, context)
        query_start.append(len(positions))
    step = PagedStep(
        positions=torch.tensor(positions),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
        query_start=torch.tensor(query_start, dtype=torch.int32),
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(queries for _, queries in rows),
        max_context_len=max(context for context, _ in rows),
    )
    return step, keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)], ids=["GQA", "MHA", "MQA"])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("window", [None, 1, 17, 255, 300])
def test_decode_attention_is_the_oracles(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    """One, two and three splits; lengths around blocks and splits; prompt rows among them."""
    num_heads, num_kv_heads = heads
    rows = [(1, 1), (16, 1), (17, 1), (5, 5), (256, 1), (257, 1), (600, 1), (40, 3)]
    step, keys, values = paged_rows(rows, num_kv_heads, head_dim, dtype)
    query = torch.randn(len(step.positions), num_heads + 2, head_dim).to(dtype)[:, :num_heads]
    options = {"scale": 0.2, "sliding_window": window, "soft_cap": None}
    expected = reference.paged_attention(query, keys, values, step, **options)
    got = cpu.paged_attention(query, keys, values, step, **options)
    assert expected.isfinite().all()
    torch.testing.assert_close(
        got.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_soft_cap_is_the_oracles() -> None:
    step, keys, values = paged_rows([(300, 1), (9, 1)], 2, 32, torch.float32)
    query = 4 * torch.randn(2, 4, 32)
    options = {"scale": 0.5, "sliding_window": None, "soft_cap": 3.0}
    expected = reference.paged_attention(query, keys, values, step, **options)
    got = cpu.paged_attention(query, keys, values, step, **options)
    torch.testing.assert_close(got, expected, rtol=5e-6, atol=5e-6)


def test_a_row_is_bit_identical_whatever_its_mates_and_threads() -> None:
    rows = [(700, 1), (3, 1), (256, 1), (511, 1), (64, 1)]
    step, keys, values = paged_rows(rows, 3, 64, torch.bfloat16)
    query = torch.randn(len(rows), 9, 64).bfloat16()
    options = {"scale": 0.125, "sliding_window": None, "soft_cap": None}
    together = cpu.paged_attention(query, keys, values, step, **options)
    threads = torch.get_num_threads()
    try:
        for row, (context, _) in enumerate(rows):
            torch.set_num_threads(1 + row % 2)
            alone = PagedStep(
                positions=step.positions[row : row + 1],
                slot_mapping=step.slot_mapping[row : row + 1],
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                context_lens=step.context_lens[row : row + 1],
                block_tables=step.block_tables[row : row + 1],
                max_query_len=1,
                max_context_len=context,
            )
            got = cpu.paged_attention(query[row : row + 1], keys, values, alone, **options)
            assert torch.equal(got[0], together[row])
    finally:
        torch.set_num_threads(threads)


def test_a_rows_own_nan_reaches_its_output_and_no_other() -> None:
    """So that the row can be failed, and its mates stay what they are."""
    step, keys, values = paged_rows([(40, 1), (40, 1)], 1, 64, torch.float32)
    query = torch.randn(2, 2, 64)
    query[0, 0, 0] = torch.nan
    got = cpu.paged_attention(
        query, keys, values, step, scale=0.125, sliding_window=None, soft_cap=None
    )
    assert got[0, 0].isnan().all()
    assert got[0, 1].isfinite().all() and got[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 576, 1000])
def test_pointwise_kernels_are_the_oracles(dtype: torch.dtype, size: int) -> None:
    """1000 is not covered by the kernels, and the eager backend takes it."""
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    x, residual = torch.randn(5, size).to(dtype), torch.randn(5, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    got, got_total = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(got_total, total)
    torch.testing.assert_close(got, expected, **close)
    torch.testing.assert_close(
        cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **close
    )
    wide = 20 * torch.randn(5, 2 * size).to(dtype)
    torch.testing.assert_close(cpu.silu_mul(wide), reference.silu_mul(wide), **close)
    cos, sin = torch.randn(5, 1, 64).to(dtype), torch.randn(5, 1, 64).to(dtype)
    sin[..., :32] = -sin[..., 32:]
    cos[..., :32] = cos[..., 32:]
    heads = torch.randn(5, 7, 64).to(dtype)[:, 1:6]
    torch.testing.assert_close(
        cpu.rotary(heads, cos, sin), reference.rotary(heads, cos, sin), **close
    )


def test_append_writes_exactly_its_slots() -> None:
    """B034: no padding, no slot -1: every other byte of the pool stays what it was."""
    pool, expected = torch.full((6, 4, 2, 16), 7.0), torch.full((6, 4, 2, 16), 7.0)
    other, expected_other = pool.clone(), expected.clone()
    packed = torch.randn(3, 8, 16)
    key, value = packed[:, 2:4], packed[:, 4:6]
    slots = torch.tensor([0, 23, 9])
    cpu.append_kv(key, value, pool, other, slots)
    reference.append_kv(key, value, expected, expected_other, slots)
    assert torch.equal(pool, expected) and torch.equal(other, expected_other)


def run(code: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    roots = os.pathsep.join(path for path in sys.path if path)
    env = os.environ | {"LEGATO_HOME": str(home), "PYTHONPATH": roots} | environ
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120
    )


SHOW = "from legato_kernels import dispatch; print(dispatch.BACKEND, '|', dispatch.REASON)"


def test_built_once_and_a_corrupt_cache_is_built_again(tmp_path: Path) -> None:
    assert run(SHOW, tmp_path).stdout.startswith("cpu |")
    [library] = (tmp_path / "kernels").glob("*.so")
    built = library.stat().st_mtime_ns
    assert run(SHOW, tmp_path).stdout.startswith("cpu |")
    assert library.stat().st_mtime_ns == built
    library.write_bytes(b"not a library")
    assert run(SHOW, tmp_path).stdout.startswith("cpu |")
    assert library.read_bytes()[:4] == b"\x7fELF"
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]


def test_without_a_compiler_plain_torch_runs_and_says_why(tmp_path: Path) -> None:
    result = run(SHOW, tmp_path, PATH="/nowhere", CXX="")
    assert result.stdout.startswith("eager | no C++ compiler was found"), result
    refused = run(SHOW, tmp_path, PATH="/nowhere", CXX="", LEGATO_KERNELS="cpu")
    assert refused.returncode != 0
    assert "ImportError: LEGATO_KERNELS=cpu: no C++ compiler" in refused.stderr


def test_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    broken.chmod(0o755)
    result = run(SHOW, tmp_path, CXX=str(broken))
    assert result.stdout.startswith("eager |") and "no such flag" in result.stdout
    assert compiler.SOURCE.exists()
