"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3) over packed rows and paged KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from legato_kernels.dispatch import (
    Linear,
    add_rms_norm,
    append_kv,
    paged_attention,
    rms_norm,
    rotary,
    silu_mul,
)
from legato_kernels.paged import PagedKV, PagedStep
from torch.nn import functional

from .base import KVLayout
from .config import DecoderConfig
from .rope import Rope


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. ``qkv`` gives query, key and value heads in this order, ``gate_up`` the
    gate and then the up projection; ``qk_norms`` are those of query and key heads (Qwen3)."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor
    head: Linear


class Decoder:
    """A :class:`~legato_worker.models.base.PackedModel`."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._weights = weights
        dtype = weights.embedding.dtype
        self._rope = Rope(config.rope, config.head_dim, dtype)
        self._scale = config.head_dim**-0.5
        self._kv_layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)

    @property
    def kv_layout(self) -> KVLayout:
        return self._kv_layout

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len

    def forward(self, token_ids: torch.Tensor, step: PagedStep, kv: PagedKV) -> torch.Tensor:
        eps, layers = self._config.rms_norm_eps, self._weights.layers
        cos, sin = self._rope.angles(step.positions)
        residual = functional.embedding(token_ids, self._weights.embedding)
        hidden = rms_norm(residual, layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in layers[1:]] + [self._weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            query, key, value = self._heads(layer, hidden, cos, sin)
            append_kv(key, value, kv.keys[index], kv.values[index], step.slot_mapping)
            attended = paged_attention(
                query,
                kv.keys[index],
                kv.values[index],
                step,
                scale=self._scale,
                sliding_window=layer.sliding_window,
            )
            hidden, residual = add_rms_norm(
                layer.output(attended.flatten(1)), residual, layer.post_norm, eps
            )
            hidden = layer.down(silu_mul(layer.gate_up(hidden)))
            hidden, residual = add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._weights.head(hidden).float()

    def _heads(
        self, layer: DecoderLayer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key (both rotated) and value [T, heads, head_dim]."""
        config = self._config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(hidden).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        value = qkv[:, num_heads + num_kv_heads :]
        if layer.qk_norms is None:  # query and key heads lie side by side: one rotation for both
            turned = rotary(qkv[:, : num_heads + num_kv_heads], cos, sin)
            return turned[:, :num_heads], turned[:, num_heads:], value
        query_norm, key_norm = layer.qk_norms
        query = rms_norm(qkv[:, :num_heads], query_norm, config.rms_norm_eps)
        key = rms_norm(qkv[:, num_heads : num_heads + num_kv_heads], key_norm, config.rms_norm_eps)
        return rotary(query, cos, sin), rotary(key, cos, sin), value
