"""The oracle: each operation written as its definition reads, in fp32, position by position.
Slow on purpose; every other backend is tested against it."""

from .append_kv import append_kv, copy_blocks
from .paged_attention import paged_attention
from .rms_norm import add_rms_norm, rms_norm
from .rotary import rotary
from .silu_mul import silu_mul

__all__ = [
    "add_rms_norm",
    "append_kv",
    "copy_blocks",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
]
