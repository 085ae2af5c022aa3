"""Our own kernels for the CPU: what :mod:`legato_kernels.reference` defines, compiled on first use.

Where a shape or type is not covered, the eager backend takes the call.
"""

from ..eager import copy_blocks
from .attention import paged_attention
from .compiler import KernelsUnavailable, load_library
from .pointwise import add_rms_norm, append_kv, rms_norm, rotary, silu_mul

__all__ = [
    "KernelsUnavailable",
    "add_rms_norm",
    "append_kv",
    "copy_blocks",
    "load_library",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
]
