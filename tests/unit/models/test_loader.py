"""Checkpoints that are whole, sharded, cast, incomplete, too much, damaged, or no safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from legato_worker.models.base import UnsupportedModelError
from legato_worker.models.checkpoint import CheckpointError
from legato_worker.models.loader import load_decoder
from safetensors.torch import load_file, save_file

from .families import make_model, save_model
from .packed import PackedSequences

NAME = "qwen3, biases, window, tied"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_model("llama, biases", folder)
    return folder


def copy_with(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def logits_of(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return PackedSequences(load_decoder(folder, dtype), 1).step({0: IDS})[0]


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    model = make_model(NAME)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(tmp_path / "sharded"), logits_of(tmp_path / "whole"))


def test_weights_are_cast_and_logits_are_fp32(source: Path) -> None:
    exact = logits_of(source)
    rounded = logits_of(source, torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_leftovers_of_other_tools_are_ignored(source: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    assert torch.equal(logits_of(copy_with(source, tmp_path, change)), logits_of(source))


def test_a_tied_checkpoint_may_hold_its_head_again(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    save_model(NAME, tmp_path)

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = copy_with(tmp_path, tmp_path / "more", change)
    assert torch.equal(logits_of(folder), logits_of(tmp_path))


def _drop(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


MISSING = "model.layers.1.mlp.up_proj.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop(MISSING), f"missing: {MISSING}"),
        (_drop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda t: t.update({"model.extra": torch.ones(1)}), "unexpected: model.extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(47)}),
            r"model.norm.weight has shape \[47\], where config.json asks for \[48\]",
        ),
        (lambda t: [t.pop(n) for n in list(t) if "layers.2" in n], "and 11 more"),
    ],
    ids=["bias", "head", "extra", "shape", "layer"],
)
def test_weights_that_do_not_fit_are_named(
    change: Callable[[Tensors], object], message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_decoder(copy_with(source, tmp_path, change), torch.float32)


def test_a_damaged_file_is_named(source: Path, tmp_path: Path) -> None:
    copy_with(source, tmp_path, lambda _: None)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_decoder(tmp_path, torch.float32)


def test_pickled_weights_are_not_looked_at(source: Path, tmp_path: Path) -> None:
    """Fault B110."""
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    torch.save({"model.norm.weight": torch.ones(48)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        load_decoder(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"model.norm.weight": "gone.safetensors"}, "gone.safetensors does not exist"),
        ({"model.norm.weight": "../other.safetensors"}, "not a file of the folder"),
        ({"model.nothing": "real.safetensors"}, "real.safetensors lacks model.nothing"),
    ],
)
def test_a_wrong_index_is_told(
    weight_map: dict[str, str], message: str, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({"model.norm.weight": torch.ones(48)}, tmp_path / "real.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path, torch.float32)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        load_decoder(tmp_path, torch.float32)
