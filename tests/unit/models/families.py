"""Small random models of each family, saved as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: LlamaForCausalLM(LlamaConfig(**SIZES | changes))


def _mistral(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: MistralForCausalLM(MistralConfig(**SIZES | changes))


def _qwen2(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES | changes))


def _qwen3(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"head_dim": 16} | changes))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, GQA": _llama(),
    "llama, MHA, tied": _llama(num_key_value_heads=6, tie_word_embeddings=True),
    "llama, MQA, own head size": _llama(num_key_value_heads=1, head_dim=20),
    "llama, biases": _llama(attention_bias=True, mlp_bias=True),
    "llama, llama3 rope": _llama(rope_parameters=LLAMA3_ROPE),
    "llama, linear rope": _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    ),
    "llama, yarn rope": _llama(rope_parameters=YARN_ROPE),
    "llama, yarn rope, all options": _llama(
        rope_parameters=YARN_ROPE
        | {"beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "llama, dynamic rope": _llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral, sliding window": _mistral(sliding_window=9),
    "mistral, no window": _mistral(sliding_window=None),
    "qwen2": _qwen2(use_sliding_window=False, sliding_window=5),
    "qwen2, window on some layers": _qwen2(
        use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen2, layer types, tied": _qwen2(
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "qwen3": _qwen3(),
    "qwen3, biases, window, tied": _qwen3(
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
}


def make_model(name: str) -> PreTrainedModel:
    """The model with every weight random, norms and biases included."""
    torch.manual_seed(sum(name.encode()))
    model = FAMILIES[name]().eval().requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            centre = 1.0 if "norm" in parameter_name else 0.0
            parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
    return model


def save_model(name: str, folder: Path) -> PreTrainedModel:
    model = make_model(name)
    model.save_pretrained(folder)
    return model
