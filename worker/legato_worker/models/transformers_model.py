"""Causal models that run through transformers' own modelling code, over paged KV.

The model is taken apart once, at load: its decoder gives hidden states for packed tokens, and what
remains of it, with a stand-in for the decoder, turns hidden states into logits just as the model
itself would (final soft cap, logit scale, bias), for the rows that need them.

Before a loaded model is handed out it has shown, on a few tokens, that packed and chunked rows give
the logits of its own attention. So a model that mixes tokens elsewhere than in attention (recurrent
states, convolutions) is refused, known by name or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from legato_kernels.paged import PagedKV, PagedStep
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from .base import KVLayout, UnsupportedModelError
from .checkpoint import CheckpointError
from .transformers_attention import PAGED, SURVEY, PagedCall, Survey, paged, surveyed

_MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Bounds on the median relative difference of logits in the check. Rounding gives a hundredth in
half precision; tokens that leak between rows, or a chunk that lost what came before it, change
most positions by several tenths. A median, since rounding may send a token to another expert."""


class TransformersModel:
    """A :class:`~legato_worker.models.base.PackedModel`; make one with :func:`load`."""

    def __init__(
        self,
        decoder: nn.Module,
        head: nn.Module,
        kv_layout: KVLayout,
        sliding_windows: tuple[int | None, ...],
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._decoder = decoder
        self._head = head
        self.sliding_windows = sliding_windows
        self.kv_layout = kv_layout
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def forward(self, token_ids: torch.Tensor, step: PagedStep, kv: PagedKV) -> torch.Tensor:
        with paged(PagedCall(step, kv, self.sliding_windows)):
            output = self._decoder(
                input_ids=token_ids[None], position_ids=step.positions[None], use_cache=False
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self._head(inputs_embeds=hidden[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits.float()


class _GivenHidden(nn.Module):
    """Stands where the decoder was: the embeddings that it is given are its hidden states."""

    def __init__(self, output_type: type[Any]) -> None:
        super().__init__()
        self._output_type = output_type

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return self._output_type(last_hidden_state=inputs_embeds)


def load(model_dir: Path, dtype: torch.dtype) -> TransformersModel:
    """Loads the causal model in ``model_dir`` from safetensors, on the CPU, in ``dtype`` (fp32,
    bf16 or fp16).

    Code that the folder may hold is never run and nothing is fetched. Raises
    :class:`~legato_worker.models.base.UnsupportedModelError` for a model that paged attention
    cannot serve faithfully, :class:`~legato_worker.models.checkpoint.CheckpointError` when weights
    are missing, and transformers' own OSError, ValueError or RuntimeError for a folder that holds
    no loadable model.
    """
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    if reason := _known_obstacle(config):
        raise UnsupportedModelError(f"{config.model_type}: {reason}")
    model, loading = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=dtype,
        attn_implementation="eager",  # and not what the config may name, such as a kernel on a hub
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := loading["missing_keys"]:
        raise CheckpointError(
            f"{config.model_type}: {len(missing)} weights are missing, such as {min(missing)}"
        )
    model.eval().requires_grad_(False)
    try:
        return _take_apart(model, config, dtype)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{config.model_type}: {error}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{config.model_type}: does not run on packed rows ({type(error).__name__}: {error})"
        ) from error


def _known_obstacle(config: Any) -> str | None:
    """What can be told from the config, before any weight is read."""
    if getattr(config, "quantization_config", None) is not None:
        return "quantized checkpoints are not supported"
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported"
    if parts := [n for n in config.sub_configs if n.startswith(("text", "vision", "audio"))]:
        return f"multimodal models are not supported (it has {', '.join(parts)})"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "multi-head latent attention is not supported"
    layers = set(getattr(config, "layer_types", None) or ())
    if other := sorted(layers - {"full_attention", "sliding_attention"}):
        return f"layers of type {', '.join(other)} are not supported"
    if getattr(config, "max_position_embeddings", None) is None:
        return "models without max_position_embeddings are not supported"
    return None


def _max_model_len(config: Any) -> int:
    """Positions over which the rotary frequencies of a row stand still.

    LongRoPE changes the frequencies of all rows (and of keys already in the cache) when any row
    passes the original length, so it ends there.
    """
    limit = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(p for p in rope.values() if isinstance(p, dict))):
        if parameters.get("rope_type") == "longrope":
            limit = min(limit, parameters["original_max_position_embeddings"])
    return limit


def _take_apart(model: Any, config: Any, dtype: torch.dtype) -> TransformersModel:
    decoder = model.base_model.get_decoder()
    vocab_size = model.get_input_embeddings().weight.shape[0]
    token_ids = (torch.arange(_CHECK_ROWS * _CHECK_LEN) * 7919 + 13) % vocab_size
    expected = model(input_ids=token_ids.view(_CHECK_ROWS, _CHECK_LEN), use_cache=False).logits

    survey = Survey(_max_model_len(config))
    model.set_attn_implementation(SURVEY)
    with surveyed(survey):
        output = decoder(
            input_ids=token_ids[None, :_CHECK_LEN],
            position_ids=torch.arange(_CHECK_LEN)[None],
            use_cache=False,
        )
    num_layers = config.num_hidden_layers
    if sorted(survey.layers) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"only {len(survey.layers)} of {num_layers} layers use the attention interface"
        )
    layers = [survey.layers[i] for i in range(num_layers)]
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"its layers differ in KV heads or head size: {sorted(shapes)}")

    model.set_attn_implementation(PAGED)
    name = next(name for name, module in model.named_modules() if module is decoder)
    model.set_submodule(name, _GivenHidden(type(output)))
    result = TransformersModel(
        decoder=decoder,
        head=model,
        kv_layout=KVLayout(num_layers, layers[0].num_kv_heads, layers[0].head_dim, dtype),
        sliding_windows=tuple(layer.sliding_window for layer in layers),
        vocab_size=vocab_size,
        max_model_len=survey.max_model_len,
    )
    _check(result, token_ids, expected.float())
    return result


_CHECK_ROWS = 4
_CHECK_LEN = 6
_CHECK_BLOCK = 16


def _check(model: TransformersModel, token_ids: torch.Tensor, expected: torch.Tensor) -> None:
    """Packed rows, in two chunks, must give the logits that the model gave by itself."""
    layout = model.kv_layout
    shape = (_CHECK_ROWS, _CHECK_BLOCK, layout.num_kv_heads, layout.head_dim)
    kv = PagedKV(
        keys=[torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.num_layers)],
        values=[torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.num_layers)],
    )
    blocks = torch.arange(_CHECK_ROWS).flip(0)
    chunk = _CHECK_LEN // 2
    got = torch.empty_like(expected)
    for start in range(0, _CHECK_LEN, chunk):
        positions = torch.arange(start, start + chunk)
        step = PagedStep(
            positions=positions.repeat(_CHECK_ROWS),
            slot_mapping=(blocks[:, None] * _CHECK_BLOCK + positions).flatten(),
            query_start=torch.arange(0, _CHECK_ROWS * chunk + 1, chunk, dtype=torch.int32),
            context_lens=torch.full((_CHECK_ROWS,), start + chunk, dtype=torch.int32),
            block_tables=blocks[:, None].to(torch.int32),
            max_query_len=chunk,
            max_context_len=start + chunk,
        )
        ids = token_ids.view(_CHECK_ROWS, _CHECK_LEN)[:, start : start + chunk].flatten()
        logits = model.logits(model.forward(ids, step, kv))
        if logits.shape[-1] != model.vocab_size:
            raise UnsupportedModelError(
                f"{model.vocab_size} embedding rows but {logits.shape[-1]} logits"
            )
        got[:, start : start + chunk] = logits.view(_CHECK_ROWS, chunk, -1)
    error = ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
    if not error <= _MAX_ERROR[layout.dtype]:
        raise UnsupportedModelError(f"packed rows differ from its own attention by {error:.2g}")
