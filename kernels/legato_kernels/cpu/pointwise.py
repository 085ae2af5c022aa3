"""Norms, rotary embedding, gated activation and KV append by the compiled kernels."""

from __future__ import annotations

import torch

from .. import eager
from .native import LANES, native

_TYPES = (torch.bfloat16, torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`legato_kernels.reference.rms_norm`."""
    size = x.shape[-1]
    if not _covered(x, weight) or size % LANES or x.dim() != 2 or x.stride(-1) != 1:
        return eager.rms_norm(x, weight, eps)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    native().rms_norm(
        x.dtype is torch.bfloat16,
        *(x.data_ptr(), x.stride(0), None, weight.data_ptr(), None, out.data_ptr()),
        *(x.shape[0], size, eps),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`legato_kernels.reference.add_rms_norm`."""
    size = x.shape[-1]
    covered = _covered(x, weight) and residual.dtype is x.dtype
    if not covered or size % LANES or x.dim() != 2 or not residual.is_contiguous():
        return eager.add_rms_norm(x, residual, weight, eps)
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    native().rms_norm(
        x.dtype is torch.bfloat16,
        *(x.data_ptr(), x.stride(0), residual.data_ptr(), weight.data_ptr()),
        *(total.data_ptr(), out.data_ptr(), x.shape[0], size, eps),
    )
    return out, total


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See :func:`legato_kernels.reference.rotary`."""
    tokens, heads, head_dim = x.shape
    alike = cos.dtype is x.dtype and cos.is_contiguous() and sin.is_contiguous()
    if not _covered(x) or not alike or head_dim % (2 * LANES) or x.stride(-1) != 1:
        return eager.rotary(x, cos, sin)
    out = torch.empty((tokens, heads, head_dim), dtype=x.dtype)
    native().rotary(
        x.dtype is torch.bfloat16,
        *(x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr()),
        *(out.data_ptr(), tokens, heads, head_dim),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See :func:`legato_kernels.reference.silu_mul`."""
    size = gate_up.shape[-1] // 2
    if not _covered(gate_up) or size % LANES or not gate_up.is_contiguous():
        return eager.silu_mul(gate_up)
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    rows = gate_up.numel() // (2 * size)
    native().silu_mul(
        gate_up.dtype is torch.bfloat16, gate_up.data_ptr(), out.data_ptr(), rows, size
    )
    return out


def append_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See :func:`legato_kernels.reference.append_kv`."""
    _, heads, head_dim = key.shape
    packed = (head_dim, 1)
    if key.stride()[1:] != packed or value.stride()[1:] != packed or not _covered(key, value):
        eager.append_kv(key, value, key_cache, value_cache, slot_mapping)
        return
    width = key.element_size()
    native().append_kv(
        *(heads * head_dim * width, key.data_ptr(), key.stride(0) * width),
        *(value.data_ptr(), value.stride(0) * width, key_cache.data_ptr()),
        *(value_cache.data_ptr(), slot_mapping.data_ptr(), key.shape[0]),
    )


def _covered(*tensors: torch.Tensor) -> bool:
    return all(t.dtype is tensors[0].dtype and t.dtype in _TYPES for t in tensors)
