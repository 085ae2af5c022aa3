from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of gate_up [T, 2 * size], gate first; returns [T, size] in its type."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :size].float(), gate_up[:, size:].float()
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
