"""Rotary position embedding: the angles of each position, with the ways to stretch a context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``kind`` and its parameters; ``attention_factor`` scales cosines and sines.

    - default: nothing but ``theta``
    - linear: positions divided by ``factor``
    - llama3: long wavelengths divided by ``factor``, short ones kept, a ramp between (Llama 3.1)
    - yarn: the same with a ramp over dimensions (Peng et al. 2023)
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


class Rope:
    """Cosines and sines as :func:`legato_kernels.dispatch.rotary` takes them."""

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype) -> None:
        self._frequencies = frequencies(config, head_dim)
        self._scale = config.attention_factor
        self._dtype = dtype

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head_dim] of positions [T], computed in fp32."""
        angle = (positions[:, None].float() * self._frequencies)[:, None]
        cos, sin = angle.cos() * self._scale, angle.sin() * self._scale
        return (
            torch.cat((cos, cos), dim=-1).to(self._dtype),
            torch.cat((-sin, sin), dim=-1).to(self._dtype),
        )


def frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each element pair, fp32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim)
    return plain


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    turns = config.original_max_len * plain / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    kept = ((turns - config.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * plain / config.factor + kept * plain


def _yarn(config: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    def dimension_of(turns: float) -> float:
        wavelength = config.original_max_len / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return (1 - kept) * plain / config.factor + kept * plain
