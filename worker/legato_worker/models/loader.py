"""From a model folder to a :class:`~legato_worker.models.decoder.Decoder`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from legato_kernels.dispatch import Linear

from .checkpoint import Checkpoint
from .config import DecoderConfig, decoder_config, read_config_json
from .decoder import Decoder, DecoderLayer, DecoderWeights

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORM = "model.norm.weight"
_BUFFER = ".rotary_emb.inv_freq"  # old checkpoints carry it; it follows from the config


def load_decoder(model_dir: Path, dtype: torch.dtype) -> Decoder:
    """Loads the model of the Llama family in ``model_dir``, in ``dtype``, on the CPU.

    Raises :class:`~legato_worker.models.base.UnsupportedModelError` for other models,
    :class:`~legato_worker.models.checkpoint.CheckpointError` when weights are missing, unexpected
    or of the wrong shape, OSError when files cannot be read. No code of the folder is ever run.
    """
    config = decoder_config(read_config_json(model_dir))
    with Checkpoint(model_dir, dtype) as checkpoint:
        names = [*_names(config), *([] if config.tied_head else [_HEAD])]
        checkpoint.require(names, ignore=lambda name: name == _HEAD or name.endswith(_BUFFER))
        return Decoder(config, _weights(config, checkpoint))


def _names(config: DecoderConfig) -> Iterator[str]:
    """The tensors of a checkpoint, but for the head."""
    yield from (_EMBEDDING, _NORM)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield from (f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight")
        if config.qk_norm:
            yield from (f"{layer}.self_attn.{name}_norm.weight" for name in "qk")
        biases = {"qkv": config.qkv_bias, "o": config.output_bias}
        for projections, has_bias in biases.items():
            for name in projections:
                yield f"{layer}.self_attn.{name}_proj.weight"
                if has_bias:
                    yield f"{layer}.self_attn.{name}_proj.bias"
        for name in ("gate", "up", "down"):
            yield f"{layer}.mlp.{name}_proj.weight"
            if config.mlp_bias:
                yield f"{layer}.mlp.{name}_proj.bias"


def _weights(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderWeights:
    hidden = config.hidden_size
    embedding = checkpoint.tensor(_EMBEDDING, config.vocab_size, hidden)
    head = embedding if config.tied_head else checkpoint.tensor(_HEAD, config.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(config, checkpoint, index) for index in range(config.num_layers)),
        final_norm=checkpoint.tensor(_NORM, hidden),
        head=Linear(head),
    )


def _layer(config: DecoderConfig, checkpoint: Checkpoint, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def norm(name: str, size: int) -> torch.Tensor:
        return checkpoint.tensor(f"{prefix}.{name}.weight", size)

    def linear(module: str, outputs: dict[str, int], num_inputs: int, *, bias: bool) -> Linear:
        """Projections of the same input, one below the other."""
        names = {f"{prefix}.{module}.{name}_proj": size for name, size in outputs.items()}
        weights = [checkpoint.tensor(f"{n}.weight", size, num_inputs) for n, size in names.items()]
        biases = [checkpoint.tensor(f"{n}.bias", size) for n, size in names.items() if bias]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    return DecoderLayer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(
            "self_attn", {"q": query_size, "k": kv_size, "v": kv_size}, hidden, bias=config.qkv_bias
        ),
        qk_norms=(norm("self_attn.q_norm", head_dim), norm("self_attn.k_norm", head_dim))
        if config.qk_norm
        else None,
        output=linear("self_attn", {"o": hidden}, query_size, bias=config.output_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear(
            "mlp",
            {"gate": config.intermediate_size, "up": config.intermediate_size},
            hidden,
            bias=config.mlp_bias,
        ),
        down=linear("mlp", {"down": hidden}, config.intermediate_size, bias=config.mlp_bias),
        sliding_window=config.sliding_windows[index],
    )
