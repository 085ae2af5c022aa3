"""The C functions of the compiled library, with their argument types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

from .compiler import load_library

LANES = 16


@dataclass(frozen=True, slots=True)
class Native:
    attend: Callable[..., int]
    rms_norm: Callable[..., None]
    rotary: Callable[..., None]
    silu_mul: Callable[..., None]
    append_kv: Callable[..., None]


@functools.cache
def native() -> Native:
    library = load_library()

    def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        found = getattr(library, name)
        found.restype, found.argtypes = result, arguments
        return found  # type: ignore[no-any-return]

    pointer = c_void_p
    return Native(
        attend=function(
            "legato_attend",
            c_int,
            *(c_int, c_int, pointer, c_int64, pointer, pointer, pointer, c_int64),
            *(pointer, pointer, pointer, c_int, c_int, c_int, c_int, c_int, c_int),
            *(c_float, c_float, pointer, pointer),
        ),
        rms_norm=function(
            "legato_rms_norm",
            None,
            *(c_int, pointer, c_int64, pointer, pointer, pointer, pointer, c_int64, c_int64),
            c_float,
        ),
        rotary=function(
            "legato_rotary",
            None,
            *(c_int, pointer, c_int64, c_int64, pointer, pointer, pointer),
            *(c_int64, c_int64, c_int64),
        ),
        silu_mul=function("legato_silu_mul", None, c_int, pointer, pointer, c_int64, c_int64),
        append_kv=function(
            "legato_append_kv",
            None,
            *(c_int64, pointer, c_int64, pointer, c_int64, pointer, pointer, pointer, c_int64),
        ),
    )
