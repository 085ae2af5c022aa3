"""The operations that models call. Here, and nowhere else, is chosen which backend runs them.

- :func:`append_kv`, :func:`copy_blocks`: writes to the KV pool
- :func:`paged_attention`: packed rows attend to their own KV
- :func:`rms_norm`, :func:`add_rms_norm`, :func:`rotary`, :func:`silu_mul`: of packed tokens
- :class:`Linear`: a weight matrix in the layout that its device multiplies fastest

Backends: ``cpu`` (compiled on first use, needs a C++ compiler), ``eager`` (plain torch), and
``reference`` (the naive oracle: is the kernel wrong, or the model?). ``LEGATO_KERNELS`` names one;
by default it is ``cpu``, or ``eager`` where that cannot be built. ``BACKEND`` says which runs, and
``REASON`` why it is not the best one.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

from . import eager, reference
from .linear import Linear

__all__ = [
    "BACKEND",
    "REASON",
    "Linear",
    "add_rms_norm",
    "append_kv",
    "copy_blocks",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
]


def _choose() -> tuple[str, str, ModuleType]:
    wanted = os.environ.get("LEGATO_KERNELS", "")
    if wanted not in ("", "cpu", "eager", "reference"):
        raise ImportError(f"LEGATO_KERNELS must be cpu, eager or reference, not {wanted!r}")
    if wanted == "reference":
        return "reference", "", reference
    if wanted == "eager":
        return "eager", "", eager
    from . import cpu

    try:
        cpu.load_library()
    except cpu.KernelsUnavailable as error:
        if wanted == "cpu":
            raise ImportError(f"LEGATO_KERNELS=cpu: {error}") from None
        return "eager", str(error), eager
    return "cpu", "", cpu


BACKEND, REASON, _module = _choose()

if TYPE_CHECKING:  # all backends have these signatures
    from .eager import (
        add_rms_norm,
        append_kv,
        copy_blocks,
        paged_attention,
        rms_norm,
        rotary,
        silu_mul,
    )
else:
    add_rms_norm = _module.add_rms_norm
    append_kv = _module.append_kv
    copy_blocks = _module.copy_blocks
    paged_attention = _module.paged_attention
    rms_norm = _module.rms_norm
    rotary = _module.rotary
    silu_mul = _module.silu_mul
