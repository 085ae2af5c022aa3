"""Paged attention as an attention function of transformers, and a survey of what models ask of it.

transformers calls attention and mask functions by the name in a model's config:

- ``legato_paged`` runs: it stores K and V and attends through the block tables. No mask function
  goes by that name, so transformers builds no mask at all.
- ``legato_survey`` computes nothing. At load it notes, layer by layer, what the model hands to its
  attention function, and refuses what paged attention would not honour. Its mask function reads the
  window of a layer off the rule by which transformers would fill the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from legato_kernels.dispatch import append_kv, paged_attention
from legato_kernels.paged import PagedKV, PagedStep
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .base import UnsupportedModelError

PAGED = "legato_paged"
SURVEY = "legato_survey"

_HONOURED = frozenset({"scaling", "softcap", "sliding_window", "is_causal", "dropout"})
_UNRELATED = frozenset({"position_ids", "use_cache"})  # no influence on attention without a mask

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of (batch, head, query position, key position), broadcast: does the query see the key?"""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Shape of a layer's K and V, and how many positions, its own included, a token sees there
    (None: all before it)."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class PagedCall:
    """A forward pass: where its rows lie, and the window of each layer."""

    step: PagedStep
    kv: PagedKV
    sliding_windows: Sequence[int | None]


@dataclass(slots=True)
class Survey:
    """Layers by index, as the attention calls of one forward pass show them."""

    max_model_len: int
    layers: dict[int, LayerAttention] = field(default_factory=dict)
    masks: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)
    """The stand-ins that transformers was given for masks, with the window of each."""


# Not every model passes unknown keyword arguments down to its attention function, hence these.
_paged_call: ContextVar[PagedCall] = ContextVar("legato_paged_call")
_survey: ContextVar[Survey] = ContextVar("legato_survey")


@contextmanager
def paged(call: PagedCall) -> Iterator[None]:
    """A forward pass inside, of a model set to :data:`PAGED`, is the one ``call`` describes."""
    token = _paged_call.set(call)
    try:
        yield
    finally:
        _paged_call.reset(token)


@contextmanager
def surveyed(survey: Survey) -> Iterator[None]:
    """A forward pass inside, of a model set to :data:`SURVEY`, fills ``survey``."""
    token = _survey.set(survey)
    try:
        yield
    finally:
        _survey.reset(token)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, head_dim] in, [1, T, heads, head_dim] out. All other arguments were found
    without effect by the survey."""
    call = _paged_call.get()
    layer: int = module.layer_idx
    keys, values = call.kv.keys[layer], call.kv.values[layer]
    append_kv(
        key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, call.step.slot_mapping
    )
    output = paged_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        call.step,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=call.sliding_windows[layer],
        soft_cap=softcap,
    )
    return output[None], None


def _survey_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Zeros of the right shape; the layer goes into the survey."""
    survey = _survey.get()
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer in survey.layers:
        raise UnsupportedModelError(f"attention layer {layer} has no KV cache of its own")
    if hasattr(module, "sinks"):
        raise UnsupportedModelError(f"layer {layer} has attention sinks")
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if unknown := sorted(given - _HONOURED - _UNRELATED):
        raise UnsupportedModelError(f"attention of layer {layer} needs {', '.join(unknown)}")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedModelError(f"layer {layer} is not causal")
    for name in ("scaling", "softcap"):
        if isinstance(kwargs.get(name), torch.Tensor):
            raise UnsupportedModelError(f"layer {layer} has learned {name}")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        raise UnsupportedModelError(
            f"heads of layer {layer} have {query.shape[-1]} query, {key.shape[-1]} key and "
            f"{value.shape[-1]} value elements; they must be equal"
        )
    windows = [window for mask, window in survey.masks if mask is attention_mask]
    if not windows:
        raise UnsupportedModelError(f"layer {layer} has a mask of its own")
    window = windows[0]
    told = kwargs.get("sliding_window")
    if told is not None and min(told, survey.max_model_len) != (window or survey.max_model_len):
        raise UnsupportedModelError(f"layer {layer} has window {told}, its mask {window}")
    survey.layers[layer] = LayerAttention(key.shape[1], key.shape[-1], window)
    return torch.zeros_like(query.transpose(1, 2)), None


def _survey_mask(*, mask_function: MaskRule, device: torch.device, **_: Any) -> torch.Tensor:
    """The window that ``mask_function`` amounts to, tried on a middle and the last position."""
    survey = _survey.get()
    max_len = survey.max_model_len
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(max_len, device=device)
    width = int(mask_function(zero, zero, keys[-1], keys).sum())
    for query in keys[[max_len // 2, -1]]:
        visible = (keys <= query) & (keys > query - width)
        if not torch.equal(mask_function(zero, zero, query, keys), visible):
            raise UnsupportedModelError("its mask is neither causal nor a sliding window")
    mask = torch.empty(1, 1, 1, 1, device=device)
    survey.masks.append((mask, width if width < max_len else None))
    return mask


ALL_ATTENTION_FUNCTIONS.register(PAGED, _paged_attention)
ALL_ATTENTION_FUNCTIONS.register(SURVEY, _survey_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SURVEY, _survey_mask)
