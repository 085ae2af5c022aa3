"""Plain torch, arranged to run fast on a CPU: what :mod:`legato_kernels.reference` defines."""

from .attention import paged_attention
from .kv import append_kv, copy_blocks
from .pointwise import add_rms_norm, rms_norm, rotary, silu_mul

__all__ = [
    "add_rms_norm",
    "append_kv",
    "copy_blocks",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
]
