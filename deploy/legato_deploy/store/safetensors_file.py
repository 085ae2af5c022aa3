"""Writes a bf16 safetensors file one tensor at a time.

The safetensors package writes a whole dict of tensors that must be in memory together, and reports
a full disk as a text of its own. Streaming keeps one tensor in memory, and OSError stays OSError.
Format: eight bytes of header length, a JSON header, the tensors back to back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ALIGNMENT = 8  # of the first tensor, as the format asks


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bf16 bits of finite fp32 values, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: npt.NDArray[np.uint16] = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(
        np.uint16
    )
    return rounded


def write_bf16_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, npt.NDArray[np.float32]]],
) -> None:
    """Writes ``tensors`` (name, fp32 values), which come in the order of ``shapes``, as bf16.

    Raises ValueError where a tensor is not the one announced.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * _num_elements(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        expected = iter(shapes.items())
        for name, values in tensors:
            if next(expected, None) != (name, values.shape):
                raise ValueError(f"unexpected tensor {name} of shape {values.shape}")
            file.write(to_bf16(values).astype("<u2", copy=False).data)
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"tensor {missing[0]} is missing")


def _num_elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
