"""What a decoder of the Llama family is, read from the config.json of its folder.

Plain JSON: reading a config imports nothing and runs no code of the folder. Both spellings of the
rotary parameters are read: ``rope_parameters`` (transformers 5) and ``rope_theta`` with
``rope_scaling`` (before).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import UnsupportedModelError
from .rope import RopeConfig

_FAMILY = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# What transformers assumes of a config that leaves these out, where families differ.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and variants of one decoder. ``sliding_windows`` holds one entry per layer: how many
    positions, its own included, a token sees there (None: all before it)."""

    vocab_size: int
    max_model_len: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ValueError when it is no JSON object, OSError when it cannot
    be read."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object")
    return config


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Raises UnsupportedModelError for a model that is not of the family or uses what
    :mod:`~legato_worker.models.decoder` has not got, ValueError for an impossible config."""
    architecture = (config.get("architectures") or [None])[0]
    family = _FAMILY.get(architecture)
    if family is None:
        known = ", ".join(_FAMILY)
        raise UnsupportedModelError(f"architecture {architecture} is none of {known}")
    if config.get("quantization_config") is not None:
        raise UnsupportedModelError(f"{architecture}: quantized checkpoints are not supported")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{architecture}: hidden_act {activation} is not supported")

    fields = _FAMILY_DEFAULTS[family] | config
    num_heads = _count(fields, "num_attention_heads")
    hidden_size = _count(fields, "hidden_size")
    num_layers = _count(fields, "num_hidden_layers")
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = num_heads
    num_kv_heads = _count(fields, "num_key_value_heads")
    if fields.get("head_dim") is None:
        fields["head_dim"] = hidden_size // num_heads
    head_dim = _count(fields, "head_dim")
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{architecture}: {num_heads} heads, {num_kv_heads} KV heads of size {head_dim}: heads "
            "must be a multiple of KV heads and the size even"
        )
    attention_bias = family in ("llama", "qwen3") and bool(fields.get("attention_bias"))
    return DecoderConfig(
        vocab_size=_count(fields, "vocab_size"),
        max_model_len=_count(fields, "max_position_embeddings"),
        hidden_size=hidden_size,
        intermediate_size=_count(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(architecture, fields),
        sliding_windows=_sliding_windows(family, fields, num_layers),
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family == "llama" and bool(fields.get("mlp_bias")),
        qk_norm=family == "qwen3",
    )


def read_eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Ids that end a sequence: those of generation_config.json, else those of config.json."""
    found = None
    path = model_dir / "generation_config.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        found = read_config_json(model_dir).get("eos_token_id")
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _sliding_windows(
    family: str, fields: dict[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    window = fields.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * num_layers
    if family == "mistral":
        return (window,) * num_layers
    if not fields.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = fields.get("layer_types") or [
        "sliding_attention" if layer >= fields["max_window_layers"] else "full_attention"
        for layer in range(num_layers)
    ]
    if len(layer_types) != num_layers:
        raise ValueError(f"config.json: {len(layer_types)} layer_types for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope(architecture: str, fields: dict[str, Any]) -> RopeConfig:
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModelError(f"{architecture}: rope per layer type is not supported")
    theta = float(given.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
    partial = given.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModelError(f"{architecture}: partial rotary embedding is not supported")
    kind = given.get("rope_type") or given.get("type") or "default"
    original = fields.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings", fields["max_position_embeddings"]
    )
    # Dynamic NTK scaling changes nothing up to max_position_embeddings, where we end anyway.
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=float(given["factor"]))
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=float(given["factor"]),
            original_max_len=original,
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
        )
    if kind == "yarn":
        factor = float(given.get("factor") or fields["max_position_embeddings"] / original)
        return RopeConfig(
            "yarn",
            theta,
            factor=factor,
            original_max_len=original,
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            truncate=bool(given.get("truncate", True)),
            attention_factor=_yarn_attention_factor(given, factor),
        )
    raise UnsupportedModelError(f"{architecture}: rope type {kind} is not supported")


def _yarn_attention_factor(given: dict[str, Any], factor: float) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (told := given.get("attention_factor")) is not None:
        return float(told)
    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)
