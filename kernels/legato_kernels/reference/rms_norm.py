from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in fp32, returned in
    x's type."""
    wide = x.float()
    mean_square = (wide * wide).sum(dim=-1, keepdim=True) / x.shape[-1]
    return (wide / torch.sqrt(mean_square + eps) * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of ``x + residual``, ``x + residual``). The inputs may be used up."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total
