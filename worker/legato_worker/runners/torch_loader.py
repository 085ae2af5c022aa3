"""From a model folder to a runner that is ready to execute."""

from __future__ import annotations

from pathlib import Path

import torch

from ..models.base import PackedModel, UnsupportedModelError
from ..models.config import read_eos_token_ids
from ..models.loader import load_decoder
from ..sampling.sampler import Sampler
from .kv_pool import allocate_kv, num_kv_blocks
from .torch_runner import TorchRunner


def load_torch_runner(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    max_num_seqs: int,
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_memory_bytes: int | None = None,
    max_model_len: int | None = None,
    num_threads: int | None = None,
) -> TorchRunner:
    """Loads the model in ``model_dir`` on the CPU and warms it up.

    Models of the Llama family run as our own packed decoder, other causal models through
    transformers' code. The KV pool has ``num_blocks`` blocks if given, else as many as fit into
    ``kv_memory_bytes`` or, if that is not given either, into half of the free memory.
    ``max_model_len`` can lower the model's own limit. ``num_threads`` holds for the whole process.

    Raises ValueError for a limit that the model does not allow, OSError or ValueError
    (:class:`~legato_worker.models.base.UnsupportedModelError`,
    :class:`~legato_worker.models.checkpoint.CheckpointError`) when the folder holds no model that
    can run, :class:`~legato_worker.runners.kv_pool.KVMemoryError` when the KV pool does not fit.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    model = _load_model(model_dir, dtype)
    if max_model_len is None:
        max_model_len = model.max_model_len
    if not 1 <= max_model_len <= model.max_model_len:
        raise ValueError(
            f"max_model_len must be 1 to {model.max_model_len} for this model, not {max_model_len}"
        )
    num_blocks = num_kv_blocks(
        model.kv_layout,
        block_size,
        num_blocks=num_blocks,
        kv_memory_bytes=kv_memory_bytes,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    return TorchRunner(
        model,
        allocate_kv(model.kv_layout, block_size, num_blocks),
        Sampler(model.vocab_size, max_num_seqs, torch.device("cpu")),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        eos_token_ids=read_eos_token_ids(model_dir),
    )


def _load_model(model_dir: Path, dtype: torch.dtype) -> PackedModel:
    try:
        return load_decoder(model_dir, dtype)
    except UnsupportedModelError as error:
        # Seconds of import that models of the family do without.
        from ..models import transformers_model

        try:
            return transformers_model.load(model_dir, dtype)
        except UnsupportedModelError as other:
            raise UnsupportedModelError(f"{other} (and no decoder of our own: {error})") from other
