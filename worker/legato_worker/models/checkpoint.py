"""Tensors of a model folder, from safetensors files and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """The weights in the folder do not fit the model; the message names the tensors."""


class Checkpoint:
    """The named tensors of a folder, mapped into memory: a tensor costs memory when it is used.

    Close it (or leave its ``with`` block) when loading is done; tensors taken stay valid. Raises
    :class:`CheckpointError` when the folder holds no safetensors or its index is wrong.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: list[Any] = []
        self._file_of: dict[str, Any] = {}
        for path, listed in _shards(model_dir).items():
            file = _open(path)
            self._files.append(file)
            names = set(file.keys())
            if listed is not None and (lost := sorted(listed - names)):
                raise CheckpointError(f"{path.name} lacks {_some(lost)}, which {_INDEX} lists")
            self._file_of.update(dict.fromkeys(names, file))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.__exit__(None, None, None)
        self._files.clear()
        self._file_of.clear()

    def require(self, names: Iterable[str], *, ignore: Callable[[str], bool]) -> None:
        """Raises :class:`CheckpointError` unless the folder holds all of ``names`` and no others
        but those to ignore."""
        held, wanted = set(self._file_of), set(names)
        problems = []
        if missing := sorted(wanted - held):
            problems.append(f"missing: {_some(missing)}")
        if extra := sorted(name for name in held - wanted if not ignore(name)):
            problems.append(f"unexpected: {_some(extra)}")
        if problems:
            raise CheckpointError(f"tensors {'; '.join(problems)}")

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, in the checkpoint's type for all. Raises :class:`CheckpointError` unless it
        has ``shape``."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, where config.json asks for {list(shape)}"
            )
        return tensor.to(self._dtype)


def _shards(model_dir: Path) -> dict[Path, set[str] | None]:
    """The folder's files, each with the tensors that the index expects in it (None: no index)."""
    if (model_dir / _SINGLE).exists():
        return {model_dir / _SINGLE: None}
    index_path = model_dir / _INDEX
    if not index_path.exists():
        raise CheckpointError(f"{model_dir} holds neither {_SINGLE} nor {_INDEX}")
    weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    shards: dict[Path, set[str] | None] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise CheckpointError(
                f"{_INDEX} names {file_name!r}, which is not a file of the folder"
            )
        shards[model_dir / file_name] = {n for n, f in weight_map.items() if f == file_name}
    return shards


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu").__enter__()  # type: ignore[no-untyped-call]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist, although {_INDEX} names it") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
