"""Converts the tokenizer inside a GGUF into tokenizer.json and tokenizer_config.json.

tokenizer.json is written as data, not through a library, so that every machine writes the same
bytes and hence the same model fingerprint.
"""

from __future__ import annotations

from pathlib import Path

from legato_deploy.store.catalogue import CatalogueEntry
from legato_deploy.store.errors import StoreError
from legato_deploy.store.gguf_model import GgufModel

_CONTROL = 3  # token type of a GGUF: never made from plain text

_BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
# By the name that llama.cpp gives to a way of cutting text before byte-pair merging.
_PRE_TOKENIZERS: dict[str, dict[str, object]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {**_BYTE_LEVEL, "add_prefix_space": False},
        ],
    }
}


def tokenizer_json(model: GgufModel) -> dict[str, object]:
    """The content of tokenizer.json. Raises StoreError for a kind of tokenizer not known here."""
    kind = (model.field("tokenizer.ggml.model"), model.field("tokenizer.ggml.pre"))
    if kind[0] != "gpt2" or kind[1] not in _PRE_TOKENIZERS:
        raise StoreError(
            f"The GGUF's tokenizer ({kind[0]}, {kind[1]}) cannot be converted. "
            "Pull the model's safetensors folder or hub id in its place."
        )
    tokens = model.field("tokenizer.ggml.tokens")
    types = model.field("tokenizer.ggml.token_type")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **_special()}
            for index, token in enumerate(tokens)
            if types[index] == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[kind[1]],
        "post_processor": None,  # adds no bos: nor does the original
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in model.field("tokenizer.ggml.merges")],
        },
    }


def tokenizer_config_json(model: GgufModel) -> dict[str, object]:
    """The content of tokenizer_config.json, chat template included."""
    tokens = model.field("tokenizer.ggml.tokens")
    types = model.field("tokenizer.ggml.token_type")

    def token(role: str) -> str | None:
        index = model.field(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {"content": token, **_special()}
            for index, token in enumerate(tokens)
            if types[index] == _CONTROL
        },
        "bos_token": token("bos"),
        "chat_template": model.field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": token("eos"),
        "model_max_length": model.field("llama.context_length"),
        "pad_token": token("padding"),
        # The class that takes tokenizer.json as it is: a named one (GPT2Tokenizer) rebuilds the
        # pre-tokenizer from its own code in transformers 5 and loses the digit splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": token("unknown"),
    }


def check_tokenizer(folder: Path, entry: CatalogueEntry) -> None:
    """Raises StoreError unless the tokenizer in ``folder``, loaded the way that router and worker
    load it, gives the catalogue's known-good ids and text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    ids = tokenizer(entry.check_text)["input_ids"]
    if tuple(ids) != entry.check_ids or tokenizer.decode(ids) != entry.check_text:
        raise StoreError(
            f"The converted tokenizer of {entry.name} does not give the ids of the original one, "
            "so nothing was stored. The installed transformers or tokenizers release reads "
            "tokenizer.json differently: install a release that Legato supports."
        )


def _special() -> dict[str, object]:
    return {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
