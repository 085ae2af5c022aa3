"""Converts a Llama-family GGUF into the files that Hugging Face loaders read: the weights.

Tensors are dequantized one by one to fp32 and stored as bf16. transformers can load a GGUF too,
but then holds the whole model in fp32, refuses to save it, and loses the digit splitting of the
tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato_deploy.store.errors import StoreError
from legato_deploy.store.safetensors_file import write_bf16_safetensors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class GgufModel:
    """An open GGUF of architecture ``llama``. Reads are lazy: the file is memory-mapped.

    Raises StoreError for a file that is no GGUF, or of another architecture.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise StoreError(f"{path.name} is not a readable GGUF file: {error}") from error
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise StoreError(
                f"{path.name} holds a {architecture!r} model; only the llama architecture can be "
                "converted. Pull the model's safetensors folder or hub id in its place."
            )

    def field(self, key: str) -> Any:
        """The value of a metadata key, or None."""
        found = self._reader.get_field(key)
        return None if found is None else found.contents()

    @property
    def num_tensor_bytes(self) -> int:
        return sum(int(tensor.n_bytes) for tensor in self._reader.tensors)

    def config(self) -> dict[str, object]:
        """The model's config.json."""
        num_heads = self.field("llama.attention.head_count")
        hidden_size = self.field("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "dtype": "bfloat16",
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "head_dim": self.field("llama.rope.dimension_count") or hidden_size // num_heads,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "max_position_embeddings": self.field("llama.context_length"),
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": num_heads,
            "num_hidden_layers": self.field("llama.block_count"),
            "num_key_value_heads": self.field("llama.attention.head_count_kv") or num_heads,
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
            "rms_norm_eps": _shortest(self.field("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self.field("llama.rope.freq_base") or 10000.0),
            "tie_word_embeddings": all(t.name != "output.weight" for t in self._reader.tensors),
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
        }

    def write_weights(self, path: Path, advance: Callable[[int], None]) -> None:
        """Writes model.safetensors; ``advance`` is told the bytes of GGUF done after each tensor.

        Raises StoreError for a tensor that the llama architecture does not have.
        """
        tensors = sorted(self._reader.tensors, key=lambda tensor: _hf_name(tensor.name))
        # A GGUF states the fastest dimension first.
        shapes = {_hf_name(t.name): tuple(int(n) for n in t.shape[::-1]) for t in tensors}

        def values() -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
            from gguf.quants import dequantize

            num_heads = self.field("llama.attention.head_count")
            num_kv_heads = self.field("llama.attention.head_count_kv") or num_heads
            for tensor in tensors:
                name = _hf_name(tensor.name)
                array = dequantize(tensor.data, tensor.tensor_type).reshape(shapes[name])
                if name.endswith("q_proj.weight"):
                    array = _halves_from_pairs(array, num_heads)
                elif name.endswith("k_proj.weight"):
                    array = _halves_from_pairs(array, num_kv_heads)
                yield name, array
                advance(int(tensor.n_bytes))

        write_bf16_safetensors(path, shapes, values())


def _hf_name(gguf_name: str) -> str:
    if gguf_name in _OUTER:
        return _OUTER[gguf_name]
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER:
        raise StoreError(
            f"The GGUF holds a tensor that the llama architecture does not have: {gguf_name}"
        )
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def _halves_from_pairs(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undoes the row order of llama.cpp, which rotates neighbours (2i, 2i+1) where Hugging Face's
    code rotates (i, i + head_dim/2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: float) -> float:
    """The shortest decimal of a number that the GGUF stores as fp32: 1e-05, not 9.99999975e-06."""
    import numpy as np

    return float(str(np.float32(value)))
