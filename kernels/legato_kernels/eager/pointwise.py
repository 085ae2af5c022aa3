"""Norms, rotary embedding and the gated activation: as few torch calls each as there can be, since
at the size of a decode step a call costs more than its arithmetic."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`legato_kernels.reference.rms_norm`."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`legato_kernels.reference.add_rms_norm`."""
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, eps), total


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See :func:`legato_kernels.reference.rotary`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See :func:`legato_kernels.reference.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
