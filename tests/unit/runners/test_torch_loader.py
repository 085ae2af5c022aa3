from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from legato_worker.models.base import UnsupportedModelError
from legato_worker.runners.base import RunnerSpec
from legato_worker.runners.kv_pool import KVMemoryError
from legato_worker.runners.torch_loader import load_torch_runner
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from ..models.families import SIZES, save_model
from .greedy_loop import expected_answer, generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("llama, GQA", path)
    return path


def test_the_spec_tells_the_limits(folder: Path) -> None:
    runner = load_torch_runner(
        folder, dtype=torch.bfloat16, max_num_seqs=3, max_model_len=50, block_size=8
    )
    assert runner.spec == RunnerSpec(
        vocab_size=SIZES["vocab_size"],
        max_model_len=50,
        block_size=8,
        num_blocks=3 * 7,
        max_num_seqs=3,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("max_model_len", [0, 257])
def test_a_length_that_the_model_has_not_got_is_refused(folder: Path, max_model_len: int) -> None:
    with pytest.raises(ValueError, match=f"must be 1 to 256 for this model, not {max_model_len}"):
        load_torch_runner(folder, dtype=torch.float32, max_num_seqs=1, max_model_len=max_model_len)


def test_a_pool_beyond_memory_is_refused(folder: Path) -> None:
    with pytest.raises(KVMemoryError, match="KV blocks need"):
        load_torch_runner(folder, dtype=torch.float32, max_num_seqs=1, num_blocks=1 << 40)


def test_other_architectures_run_through_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).eval()
    model.save_pretrained(tmp_path)
    runner = load_torch_runner(
        tmp_path, dtype=torch.float32, max_num_seqs=2, num_blocks=9, block_size=4
    )
    runner.poison_free_blocks()
    prompts = [[5, 6, 7], [8] * 11, [9]]
    got = generate(runner, prompts, [6, 6, 6], budget=5, depth=1)
    assert got == [expected_answer(model, prompt, 6) for prompt in prompts]


def test_a_model_that_nothing_can_run_is_named(tmp_path: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration"):
        load_torch_runner(tmp_path, dtype=torch.float32, max_num_seqs=1)


def test_models_of_the_family_do_without_transformers(folder: Path) -> None:
    script = f"""
import sys, torch
from pathlib import Path
sys.path[:0] = {sys.path!r}
from legato_worker.runners.torch_loader import load_torch_runner
load_torch_runner(Path({str(folder)!r}), dtype=torch.float32, max_num_seqs=1, num_blocks=1)
sys.exit("transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
