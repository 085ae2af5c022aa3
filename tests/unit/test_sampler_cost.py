"""What each kind of row costs, counted in operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from legato_worker.core.batch import Sample
from legato_worker.core.request import GREEDY, SamplingParams
from legato_worker.sampling.sampler import Sampler
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.sampling_cases import CPU, KINDS, attached, logits_like


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operations run, and the elements that each made or read at the vocabulary's
    scale."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size = vocab_size
        self.wide: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        size = max((t.numel() for t in tensors), default=0)
        moves_data = "view" not in str(func) and "_unsafe" not in str(func)
        if size >= self.vocab_size and moves_data:
            made = result.numel() if isinstance(result, torch.Tensor) else size
            self.wide.append((str(func), made))
        return result


def _recorded(rows: list[SamplingParams]) -> list[tuple[str, int]]:
    vocab_size = 20_000
    sampler = Sampler(vocab_size, len(rows), CPU)
    for slot, params in enumerate(rows):
        sampler.attach(attached(params, slot=slot))
    logits = logits_like(len(rows), vocab_size, seed=16)
    samples = [Sample(i, i, 3) for i in range(len(rows))]
    recorder = _Recorder(vocab_size)
    with recorder:
        sampler.sample(logits, samples)
    return recorder.wide


def test_a_greedy_batch_costs_one_maximum() -> None:
    wide = _recorded([GREEDY] * 64)
    assert [name for name, _ in wide] == ["aten.max.dim"]


@pytest.mark.parametrize("params", KINDS[2:])
def test_one_dear_row_costs_its_63_plain_mates_nothing(params: SamplingParams) -> None:
    """Besides the one maximum, everything made at the vocabulary's scale is one row wide."""
    wide = _recorded([GREEDY] * 63 + [params])
    assert wide[0][0] == "aten.max.dim" and len(wide) > 1
    assert all(made <= 20_000 for _, made in wide[1:])


def test_top_k_rows_are_never_sorted() -> None:
    """Whatever k; and top-p rows whose nucleus is small are not either."""
    rows = [SamplingParams(temperature=1.0, top_k=k, seed=k) for k in (2, 50, 5000, 19_999)]
    rows.append(SamplingParams(temperature=1.0, top_k=6000, top_p=0.9))
    rows.append(SamplingParams(temperature=0.5, top_p=0.9))
    assert not [name for name, _ in _recorded(rows) if "sort" in name]
