"""Configs as files hold them, old and new, against transformers' own reading."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from legato_worker.models.base import UnsupportedModelError
from legato_worker.models.config import decoder_config, read_config_json, read_eos_token_ids
from legato_worker.models.rope import RopeConfig
from transformers import AutoConfig

from .families import LLAMA3_ROPE, SIZES

BASE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 64,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "vocab_size": 150,
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_json(model_type: str, **fields: Any) -> dict[str, Any]:
    return BASE | {"model_type": model_type, "architectures": [MODEL_TYPES[model_type]]} | fields


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_sliding_window": True},
        {"sliding_window": None, "use_sliding_window": True},
        {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
        {"num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5},
        {"num_key_value_heads": 8, "tie_word_embeddings": True},
        {"max_position_embeddings": 77, "rope_theta": 5e5},
    ],
)
def test_what_a_file_leaves_out_is_what_transformers_assumes(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    config = config_json(model_type, **fields)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = decoder_config(read_config_json(tmp_path))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4096 // 32)
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    window = None if model_type == "llama" else theirs.sliding_window
    layer_types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
    assert ours.sliding_windows == tuple(
        window if kind == "sliding_attention" else None for kind in layer_types
    )


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_rope_is_read_in_both_spellings(type_key: str) -> None:
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_theta", "rope_type")}
    scaling[type_key] = "llama3"
    old = decoder_config(config_json("llama", rope_theta=5000.0, rope_scaling=scaling))
    new = decoder_config(config_json("llama", rope_parameters=LLAMA3_ROPE))
    assert old == new
    assert new.rope == RopeConfig("llama3", 5000.0, factor=8.0, original_max_len=32)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None}, "architecture None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
    ],
)
def test_what_the_decoder_has_not_got_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        decoder_config(config_json("llama") | fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "32 heads, 5 KV heads"),
        ({"head_dim": 7}, "size 7"),
    ],
)
def test_impossible_sizes_are_told(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decoder_config(config_json("llama") | fields)


def test_layer_types_must_name_every_layer() -> None:
    config = config_json("qwen2", use_sliding_window=True, layer_types=["sliding_attention"])
    with pytest.raises(ValueError, match="1 layer_types for 30 layers"):
        decoder_config(config)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_config_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config_json(tmp_path)


def test_code_of_the_folder_is_never_imported(tmp_path: Path) -> None:
    """Fault B112: a class map in the config names a module that leaves a marker."""
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = config_json("llama", auto_map={"AutoConfig": "evil.Config"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder_config(read_config_json(tmp_path))
    assert not marker.exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, (7, 8)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({}, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_eos_ids(
    generation: dict[str, Any] | None,
    model: dict[str, Any],
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"eos_token_id": None} | model))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path) == expected
