"""A model that this router serves: tokenizer, chat template, and the workers that run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from legato.v1 import worker_pb2 as pb

from .tokenizer import ModelTokenizer, TokenizerPool
from .validated import ModelLimits
from .worker_link import WorkerLink

MAX_N = 16


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the router holds of a model by itself; limits come from its workers."""

    name: str
    fingerprint: str
    tokenizer: ModelTokenizer
    pool: TokenizerPool
    has_chat_template: bool


def workers_of(model: ServedModel, links: list[WorkerLink]) -> Iterator[WorkerLink]:
    """Attached workers that serve this very model: name and fingerprint agree, so that an answer
    is never continued on other weights or another tokenizer."""
    for link in links:
        spec = link.view.model if link.view is not None else None
        if spec is not None and spec.name == model.name and spec.fingerprint == model.fingerprint:
            yield link


def limits_of(specs: list[pb.ModelSpec]) -> ModelLimits:
    """What the most capable of some workers can take."""
    return ModelLimits(
        vocab_size=min(spec.vocab_size for spec in specs),
        max_model_len=max(spec.max_model_len for spec in specs),
        block_size=max(spec.block_size for spec in specs),
        num_blocks=max(spec.num_blocks for spec in specs),
        eos_token_ids=tuple(specs[0].eos_token_ids),
        max_n=min(MAX_N, max(spec.max_num_seqs for spec in specs)),
    )
