"""Chained hashes of KV blocks, computed alike by router and worker.

A block's hash covers its own tokens and, through its parent's hash, everything before it, so equal
hashes name equal prefixes (vLLM's and SGLang's prefix caches use the same idea). The root covers
what else must be equal for KV to be reusable: model fingerprint, tenant, salt, adapter. Its parts
are tagged and length-prefixed, so that no two different sets of parts give the same bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def cache_root(*, fingerprint: str, tenant: str = "", salt: str = "", adapter: str = "") -> bytes:
    """The parent hash of a first block."""
    digest = sha256(b"legato.block_hash.v1")
    for tag, part in (("f", fingerprint), ("t", tenant), ("s", salt), ("a", adapter)):
        raw = part.encode()
        digest.update(f"{tag}{len(raw)}:".encode())
        digest.update(raw)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block holding ``token_ids`` behind the prefix that ``parent`` names."""
    return sha256(parent + array("I", token_ids).tobytes()).digest()


def chain(root: bytes, token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Hashes of all full blocks of ``token_ids``."""
    hashes = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return tuple(hashes)
