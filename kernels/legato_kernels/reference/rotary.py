from __future__ import annotations

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns element pairs (i, i + D / 2) of x [T, heads, D] by an angle per token and pair (RoPE,
    with GPT-NeoX's pairing, as in the published Llama checkpoints).

    ``cos`` [T, 1, D] holds the D / 2 cosines twice, ``sin`` [T, 1, D] the negated sines and then
    the sines, both in x's type.
    """
    half = x.shape[-1] // 2
    output = torch.empty_like(x)
    for token in range(x.shape[0]):
        for i in range(half):
            c, s = cos[token, 0, i].float(), sin[token, 0, half + i].float()
            first, second = x[token, :, i].float(), x[token, :, half + i].float()
            output[token, :, i] = (first * c - second * s).to(x.dtype)
            output[token, :, half + i] = (second * c + first * s).to(x.dtype)
    return output
