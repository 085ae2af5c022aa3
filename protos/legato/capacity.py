"""How many KV blocks a request may come to need: one answer for router, worker and tests.

A sequence of P prompt tokens and T generated ones stores P + T - 1 of them, since the last one is
never fed back. The n sequences of a request share the full blocks of their prompt; from the block
that holds the prompt's end on, each has blocks of its own.
"""

from __future__ import annotations


def blocks_needed(prompt_len: int, max_tokens: int, n: int, block_size: int) -> int:
    """Most KV blocks that a request can hold at one time (all arguments >= 1)."""
    shared = prompt_len // block_size
    whole = -(-(prompt_len + max_tokens - 1) // block_size)
    return shared + n * (whole - shared)


def max_tokens_that_fit(prompt_len: int, n: int, block_size: int, num_blocks: int) -> int:
    """Largest ``max_tokens`` with which the request needs at most ``num_blocks``; below 1 when the
    prompt alone is too large."""
    shared = prompt_len // block_size
    private = (num_blocks - shared) // n
    return (shared + private) * block_size - prompt_len + 1
