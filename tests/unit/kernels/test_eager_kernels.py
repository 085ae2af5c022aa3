"""The fast kernels against the oracle, over a pool whose unowned slots hold NaN (fault B032)."""

from __future__ import annotations

import pytest
import torch
from legato_kernels import eager, reference
from legato_kernels.eager import plan
from legato_kernels.linear import Linear
from legato_kernels.paged import PagedKV, PagedStep

BLOCK = 4
HEAD_DIM = 8


def paged_rows(
    rows: list[tuple[int, int]], num_kv_heads: int, dtype: torch.dtype, seed: int
) -> tuple[PagedStep, torch.Tensor, torch.Tensor]:
    """Rows of (context length, query length) with scattered blocks, in a pool of NaN. Entries of
    the block tables behind a row's length name blocks that do not exist."""
    random = torch.Generator().manual_seed(seed)
    num_blocks = [-(-context // BLOCK) for context, _ in rows]
    shuffled = torch.randperm(sum(num_blocks) + 3, generator=random).tolist()
    tables = torch.full((len(rows), max(num_blocks) + 1), 1 << 30, dtype=torch.int32)
    shape = (len(shuffled), BLOCK, num_kv_heads, HEAD_DIM)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    positions, slots, query_start = [], [], [0]
    for row, (context, queries) in enumerate(rows):
        for index in range(num_blocks[row]):
            tables[row, index] = shuffled.pop()
        for position in range(context):
            block = int(tables[row, position // BLOCK])
            keys[block, position % BLOCK] = torch.randn(shape[2:], generator=random)
            values[block, position % BLOCK] = torch.randn(shape[2:], generator=random)
            if position >= context - queries:
                positions.append(position)
                slots.append(block * BLOCK + position % BLOCK)
        query_start.append(len(positions))
    step = PagedStep(
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor(query_start, dtype=torch.int32),
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(queries for _, queries in rows),
        max_context_len=max(context for context, _ in rows),
    )
    return step, keys.to(dtype), values.to(dtype)


ROWS = {
    "one token": [(1, 1)],
    "whole prompt": [(11, 11)],
    "full blocks": [(8, 8), (8, 1)],
    "decode, very unequal lengths": [(1, 1), (190, 1), (7, 1), (120, 1), (4, 1), (3, 1)],
    "decode, one length": [(9, 1), (9, 1), (9, 1)],
    "prompt, chunk and decode rows": [(5, 1), (6, 6), (13, 7), (2, 2), (30, 1), (1, 1)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 300])
@pytest.mark.parametrize("soft_cap", [None, 0.8])
def test_attention_is_the_oracles(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    soft_cap: float | None,
) -> None:
    num_heads, num_kv_heads = heads
    step, keys, values = paged_rows(rows, num_kv_heads, torch.float32, seed=len(rows))
    query = torch.randn(len(step.positions), num_heads, HEAD_DIM)
    expected = reference.paged_attention(
        query, keys, values, step, scale=0.4, sliding_window=window, soft_cap=soft_cap
    )
    assert expected.isfinite().all()
    for _ in range(2):  # the second time with the plan of the first
        got = eager.paged_attention(
            query, keys, values, step, scale=0.4, sliding_window=window, soft_cap=soft_cap
        )
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 129])
def test_attention_over_several_tiles_is_the_oracles(window: int | None) -> None:
    step, keys, values = paged_rows([(3, 1), (290, 257), (128, 128)], 1, torch.float32, seed=1)
    query = torch.randn(len(step.positions), 2, HEAD_DIM)
    expected = reference.paged_attention(
        query, keys, values, step, scale=0.4, sliding_window=window
    )
    got = eager.paged_attention(query, keys, values, step, scale=0.4, sliding_window=window)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("max_padding", [0, 1, 100, 10_000])
@pytest.mark.parametrize("window", [None, 30])
def test_decode_rows_may_be_batched_in_any_way(
    max_padding: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_PADDING_ELEMENTS", max_padding * HEAD_DIM)
    rows = [(length, 1) for length in (3, 90, 1, 33, 90, 31, 29, 64, 2, 4)]
    step, keys, values = paged_rows(rows, 1, torch.float32, seed=5)
    query = torch.randn(len(rows), 2, HEAD_DIM)
    expected = reference.paged_attention(
        query, keys, values, step, scale=0.4, sliding_window=window
    )
    got = eager.paged_attention(query, keys, values, step, scale=0.4, sliding_window=window)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    calls = plan.plan_attention(step, keys.shape, window, torch.float32)
    padding = sum(len(call.key_slots) for call in calls) - sum(
        min(length, window or length) for length, _ in rows
    )
    assert padding <= len(calls) * max_padding
    assert (len(calls) == 1) == (max_padding == 10_000)


def test_layers_with_different_windows_do_not_share_a_plan() -> None:
    step, keys, values = paged_rows([(9, 3)], 1, torch.float32, seed=2)
    query = torch.randn(3, 1, HEAD_DIM)
    for window in (None, 2, 3, None):
        expected = reference.paged_attention(
            query, keys, values, step, scale=1.0, sliding_window=window
        )
        got = eager.paged_attention(query, keys, values, step, scale=1.0, sliding_window=window)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


def test_attention_in_bf16_is_the_oracles_but_for_rounding() -> None:
    rows = [(40, 1), (17, 17), (38, 1)]
    step, keys, values = paged_rows(rows, 2, torch.bfloat16, seed=3)
    query = torch.randn(len(step.positions), 6, HEAD_DIM).bfloat16()
    expected = reference.paged_attention(query, keys, values, step, scale=0.4)
    got = eager.paged_attention(query, keys, values, step, scale=0.4)
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)


def test_a_row_of_nan_leaves_its_batch_mates_alone() -> None:
    rows = [(9, 1), (9, 1), (8, 1), (6, 5)]
    step, keys, values = paged_rows(rows, 2, torch.float32, seed=4)
    query = torch.randn(len(step.positions), 4, HEAD_DIM)
    healthy = eager.paged_attention(query, keys, values, step, scale=0.4)
    keys[int(step.block_tables[1, 0]), 2] = torch.nan
    values[int(step.block_tables[1, 1]), 1] = torch.inf
    sick = eager.paged_attention(query, keys, values, step, scale=0.4)
    assert not sick[1].isfinite().any()
    mates = [0, 2, 3, 4, 5, 6, 7]
    assert torch.equal(sick[mates], healthy[mates])


@pytest.mark.parametrize("kernels", [eager, reference], ids=["eager", "reference"])
def test_append_writes_its_slots_and_nothing_else(kernels) -> None:  # type: ignore[no-untyped-def]
    keys, values = torch.full((2, 5, BLOCK, 2, HEAD_DIM), torch.nan)
    packed = torch.randn(3, 6, HEAD_DIM)  # as slices of a joint projection: not contiguous
    key, value = packed[:, 2:4], packed[:, 4:]
    slots = [17, 2, 3]
    kernels.append_kv(key, value, keys, values, torch.tensor(slots))
    for cache, given in ((keys, key), (values, value)):
        flat = cache.view(-1, 2, HEAD_DIM)
        assert torch.equal(flat[slots], given)
        assert int(flat.isfinite().all(dim=-1).all(dim=-1).sum()) == 3


@pytest.mark.parametrize("kernels", [eager, reference], ids=["eager", "reference"])
def test_copied_blocks_are_equal_in_every_layer(kernels) -> None:  # type: ignore[no-untyped-def]
    def caches() -> list[torch.Tensor]:
        return [torch.randn(6, BLOCK, 1, HEAD_DIM) for _ in range(2)]

    kv = PagedKV(caches(), caches())
    before = [cache.clone() for cache in (*kv.keys, *kv.values)]
    kernels.copy_blocks(kv, torch.tensor([4, 4, 0]), torch.tensor([1, 5, 3]))
    for cache, old in zip((*kv.keys, *kv.values), before, strict=True):
        assert torch.equal(cache, old[[0, 4, 2, 0, 4, 4]])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)], ids=["fp32", "bf16"]
)
def test_pointwise_kernels_are_the_oracles(dtype: torch.dtype, tolerance: float) -> None:
    def close(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)

    x, residual = torch.randn(2, 5, 24).to(dtype)
    weight = torch.randn(24).to(dtype)
    close(eager.rms_norm(x, weight, 1e-2), reference.rms_norm(x, weight, 1e-2))
    got = eager.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    heads = torch.randn(5, 7, HEAD_DIM).to(dtype)[:, 1:4]
    angle = torch.randn(5, 1, HEAD_DIM // 2)
    cos, sin = angle.cos().repeat(1, 1, 2).to(dtype), angle.sin()
    sin = torch.cat((-sin, sin), dim=-1).to(dtype)
    close(eager.rotary(heads, cos, sin), reference.rotary(heads, cos, sin))
    close(eager.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_a_matrix_product(dtype: torch.dtype, num_rows: int, with_bias: bool) -> None:
    weight = torch.randn(40, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if with_bias else None
    x = torch.randn(num_rows, 48).to(dtype)[:, 24:]
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    got = Linear(weight, bias)(x)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=tolerance)
