"""What makes a folder a model that Legato can serve: config, safetensors, tokenizer.

Only data files are ever selected. Pickle weights and Python files in the folder are left alone:
both can run code when loaded, and nothing here or later loads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from legato_deploy.store.errors import StoreError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OPTIONAL = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


def model_files(folder: Path) -> tuple[str, ...]:
    """The names of the files that make up the model in ``folder``.

    Raises StoreError when it is not whole: a required file absent or not JSON, a shard of the
    index absent, a safetensors file cut short.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder.")
    config = _json_object(folder, "config.json")
    if not isinstance(config.get("model_type"), str):
        raise StoreError(f"{folder / 'config.json'} names no model_type, so it is not a model's.")
    weights = _weight_files(folder)
    _json_object(folder, "tokenizer.json")
    for name in weights:
        if name.endswith(".safetensors"):
            _check_safetensors(folder / name)
    optional = tuple(name for name in _OPTIONAL if (folder / name).is_file())
    return ("config.json", "tokenizer.json", *weights, *optional)


def _weight_files(folder: Path) -> tuple[str, ...]:
    if (folder / _INDEX).is_file():
        shards = _json_object(folder, _INDEX).get("weight_map")
        names = sorted(set(shards.values())) if isinstance(shards, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise StoreError(f"{folder / _INDEX} lists no shards, or shards of another folder.")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise StoreError(f"{folder} lacks weight files that its index lists: {absent}.")
        return (_INDEX, *names)
    if (folder / _SINGLE).is_file():
        return (_SINGLE,)
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        return tuple(others)
    if pickles := sorted(path.name for glob in _PICKLES for path in folder.glob(glob)):
        raise StoreError(
            f"{folder} holds pickle weights only ({', '.join(pickles[:3])}). Loading a pickle can "
            "run any code in it, so Legato never does. Get the model's safetensors files, or "
            "convert on a machine that you can lose: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    raise StoreError(f"{folder} holds no *.safetensors weights.")


def _json_object(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(
            f"{folder} has no {name}. A model folder holds config.json, *.safetensors and "
            "tokenizer.json."
        ) from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path} is not a JSON object.")
    return value


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            names = list(tensors.keys())
    except SafetensorError as error:
        raise StoreError(
            f"{path} is damaged or cut short ({error}). Download or copy it again."
        ) from error
    if not names:
        raise StoreError(f"{path} holds no tensors.")
