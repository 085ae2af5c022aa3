"""Models run through transformers' own code over paged KV, against their own eager attention."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from legato_kernels.paged import PagedKV, PagedStep
from legato_worker.models.base import UnsupportedModelError
from legato_worker.models.checkpoint import CheckpointError
from legato_worker.models.transformers_model import TransformersModel, load
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

VOCAB = 96
BLOCK = 4
NUM_BLOCKS = 48
WINDOW = 9  # neither a multiple of the block nor of the chunk

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # so that attention decides about logits
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25, "use_parallel_residual": True},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "initializer_range": 0.3, "init_std": 0.3},
    "cohere": {"logit_scale": 0.5},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small threads only wait for each other: minutes on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_config(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SHAPE, **changes})


def save(config: Any, folder: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small random model of a family, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            config = make_config(family, **FAMILIES[family])
            made[family] = save(config, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def eager_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([token_ids])).logits[0]
    return logits


class Pool:
    """A KV pool full of NaN and the sequences that live in it, in scattered blocks."""

    def __init__(self, model: TransformersModel) -> None:
        layout = model.kv_layout
        shape = (NUM_BLOCKS, BLOCK, layout.num_kv_heads, layout.head_dim)

        def layers() -> list[torch.Tensor]:
            return [
                torch.full(shape, torch.nan, dtype=layout.dtype) for _ in range(layout.num_layers)
            ]

        self.model = model
        self.kv = PagedKV(layers(), layers())
        self.free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
        self.tables: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}

    def run(self, chunks: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """The next token ids of some sequences, packed into one step: logits of every position."""
        positions: list[int] = []
        slots: list[int] = []
        bounds = [0]
        for name, ids in chunks.items():
            table, start = self.tables.setdefault(name, []), self.done.get(name, 0)
            self.done[name] = end = start + len(ids)
            while len(table) * BLOCK < end:
                table.append(self.free.pop())
            positions += range(start, end)
            slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, end)]
            bounds.append(bounds[-1] + len(ids))
        widest = max(len(self.tables[name]) for name in chunks)
        tables = [self.tables[name] + [10**6] * widest for name in chunks]
        context = [self.done[name] for name in chunks]
        step = PagedStep(
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_start=torch.tensor(bounds, dtype=torch.int32),
            context_lens=torch.tensor(context, dtype=torch.int32),
            block_tables=torch.tensor([t[:widest] for t in tables], dtype=torch.int32),
            max_query_len=max(len(ids) for ids in chunks.values()),
            max_context_len=max(context),
        )
        token_ids = torch.tensor([i for ids in chunks.values() for i in ids])
        logits = self.model.logits(self.model.forward(token_ids, step, self.kv))
        assert logits.dtype == torch.float32
        return {name: logits[bounds[i] : bounds[i + 1]] for i, name in enumerate(chunks)}


def make_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eager_attention(family: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(family)
    model = load(folder, torch.float32)
    prompts = {i: make_prompt(length, seed=i) for i, length in enumerate((45, 31, 17, 2))}
    expected = {i: eager_logits(folder, ids) for i, ids in prompts.items()}
    other_start = eager_logits(folder, [(prompts[2][0] + 1) % VOCAB, *prompts[2][1:]])
    assert (other_start[-1] - expected[2][-1]).abs().max() > 1e-2, "attention must matter here"

    assert_close(Pool(model).run({0: prompts[0]})[0], expected[0])

    pool = Pool(model)
    pieces = [pool.run({0: prompts[0][i : i + 7]})[0] for i in range(0, 45, 7)]
    assert_close(torch.cat(pieces), expected[0])

    # Rows of unlike length and phase: some prefill, some decode, some join late or have ended.
    pool = Pool(model)
    got: dict[int, list[torch.Tensor]] = {i: [] for i in prompts}
    sizes = {0: 13, 1: 7, 2: 1, 3: 2}
    at = dict.fromkeys(prompts, 0)
    for step in range(40):
        chunks = {
            i: ids[at[i] : at[i] + sizes[i]]
            for i, ids in prompts.items()
            if at[i] < len(ids) and step >= i
        }
        if not chunks:
            break
        for i, logits in pool.run(chunks).items():
            got[i].append(logits)
            at[i] += len(logits)
    for i in prompts:
        assert_close(torch.cat(got[i]), expected[i])


def test_layout_windows_and_limits(folder_of: Callable[[str], Path]) -> None:
    gemma2 = load(folder_of("gemma2"), torch.bfloat16)
    assert gemma2.kv_layout.token_bytes == 2 * 3 * 2 * 16 * 2
    assert (gemma2.vocab_size, gemma2.max_model_len) == (VOCAB, 64)
    assert gemma2.sliding_windows == (WINDOW, None, WINDOW)
    assert load(folder_of("phi3"), torch.float32).sliding_windows == (WINDOW,) * 3
    assert load(folder_of("gpt_neox"), torch.float32).kv_layout.num_kv_heads == 4


def test_logits_of_no_rows(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("gemma2"), torch.float32)
    assert model.logits(torch.empty(0, 32)).shape == (0, VOCAB)


def test_half_precision_agrees_roughly(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("gpt_neox"), torch.bfloat16)
    ids = make_prompt(20, seed=3)
    expected = eager_logits(folder_of("gpt_neox"), ids)
    got = Pool(model).run({0: ids})[0]
    assert (got - expected).norm() / expected.norm() < 0.05


def test_longrope_ends_where_its_frequencies_change(tmp_path: Path) -> None:
    """Past the original length LongRoPE changes the frequencies of every row of the batch."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 24,
    }
    config = make_config("phi3", rope_parameters=rope, original_max_position_embeddings=24)
    model = load(save(config, tmp_path), torch.float32)
    assert model.max_model_len == 24
    ids = make_prompt(24, seed=4)
    assert_close(Pool(model).run({0: ids})[0], eager_logits(tmp_path, ids))


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("gemma3", {}, "multimodal"),
        ("mamba", {}, "linear_attention"),
        ("jamba", {}, "linear_attention"),
        ("llama4_text", {}, "chunked_attention"),
        ("deepseek_v3", {}, "latent attention"),
        ("bloom", {}, "max_position_embeddings"),  # ALiBi
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantized"),
    ],
)
def test_refused_from_the_config_alone(
    model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"^{model_type}: .*{reason}"):
        load(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}, "attention sinks"),
        ("falcon", {"alibi": True}, "0 of 3 layers"),
        ("bart", {"d_model": 32, "decoder_layers": 3, "decoder_ffn_dim": 48}, "neither causal"),
        ("diffllama", {}, "KV cache of its own"),
        ("roberta", {"is_decoder": True}, "differ from its own attention"),  # offset positions
    ],
)
def test_refused_after_a_look_at_its_attention(
    model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save(make_config(model_type, **changes), tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"^{model_type}: .*{reason}"):
        load(tmp_path, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refused_if_tokens_mix_outside_attention(
    dtype: torch.dtype, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a short convolution, which would read across rows and lose its state at a chunk."""
    plain = modeling_llama.LlamaMLP.forward

    def shifted(self: torch.nn.Module, x: torch.Tensor) -> Any:
        return plain(self, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", shifted)
    with pytest.raises(UnsupportedModelError, match=r"llama: .*differ from its own attention"):
        load(folder_of("llama"), dtype)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    small = save(make_config("llama", num_hidden_layers=2), tmp_path)
    edit_config(small, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"llama: 9 weights are missing"):
        load(small, torch.float32)


# Nothing in a model folder is run (B110, B112) --------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def plant_code(folder: Path, marker: Path) -> dict[str, str]:
    """A module that writes ``marker`` on import; the class map that names it."""
    (folder / "planted.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    )
    return {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}


@pytest.mark.parametrize("model_type", ["llama", "planted"])
def test_code_in_the_folder_is_never_imported(model_type: str, tmp_path: Path) -> None:
    folder = save(make_config("llama"), tmp_path / "model")
    marker = tmp_path / "marker"
    auto_map = plant_code(folder, marker)
    edit_config(folder, model_type=model_type, auto_map=auto_map)
    if model_type == "llama":
        load(folder, torch.float32)
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(folder, torch.float32)
    assert not marker.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_named_in_the_config_is_not_fetched(key: str, tmp_path: Path) -> None:
    folder = save(make_config("llama"), tmp_path)
    edit_config(folder, **{key: "someone/some-kernel"})
    load(folder, torch.float32)


class Planted:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    folder = save(make_config("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Planted(marker)))
    with pytest.raises(OSError, match="safetensors"):
        load(folder, torch.float32)
    assert not marker.exists()
