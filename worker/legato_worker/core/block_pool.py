"""The blocks of the KV cache: who holds them, which of them can be reused, which go next.

Block ids are ``0 .. num_blocks - 1``. Each block is at any moment in exactly one of three states:

- used: referenced by at least one sequence (or awaiting the end of the step that may write it)
- cached: unreferenced, but its content is a known prefix that a lookup may bring back
- free: unreferenced and blank

``free + cached + used == num_blocks`` always. Allocation takes free blocks first, then evicts
cached ones, least recently released first (the eviction order is that of vLLM's BlockPool).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

Lineage = bytes | int
"""What precedes a cached block: a cache root (first block) or the unique number of its parent."""


@dataclass(slots=True)
class _Content:
    """Identity of a block's content: its hash, its own tokens, what precedes it, its number."""

    block_hash: bytes
    token_ids: tuple[int, ...]
    parent: Lineage
    number: int


class PoolError(AssertionError):
    """The accounting of blocks was violated: a bug, never a consequence of input."""


class BlockPool:
    """Owner of all blocks. Not thread-safe: belongs to the engine thread."""

    def __init__(self, num_blocks: int, *, record_events: bool = False) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks  # by block id; written here only
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._content: list[_Content | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._next_number = 0
        self._record_events = record_events
        self._events: list[tuple[bool, bytes]] = []

    @property
    def num_free(self) -> int:
        """Blank blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` blocks with one reference each, or none at all."""
        if count > len(self._free) + len(self._cached):
            return None
        blocks = []
        for _ in range(count):
            block_id = self._free.pop() if self._free else self._evict()
            self.references[block_id] = 1
            blocks.append(block_id)
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block; a cached one becomes used."""
        for block_id in block_ids:
            if self.references[block_id] == 0:
                if block_id not in self._cached:
                    raise PoolError(f"block {block_id} is free and cannot be shared")
                del self._cached[block_id]
            self.references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops a reference of each block of a table, given in table order.

        Blocks go to the eviction queue last first, so that of one prefix the tail is evicted before
        what it hangs on.
        """
        for block_id in reversed(list(block_ids)):
            references = self.references[block_id] - 1
            if references < 0:
                raise PoolError(f"block {block_id} was released more often than taken")
            self.references[block_id] = references
            if references == 0:
                if self._content[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def lookup(self, block_hash: bytes, token_ids: tuple[int, ...], parent: Lineage) -> int | None:
        """The block with this content behind this parent, or None. Takes no reference.

        Tokens and lineage are compared, so equal hashes of different prefixes cost a miss and never
        a wrong reuse.
        """
        block_id = self._index.get(block_hash)
        if block_id is None:
            return None
        content = self._content[block_id]
        if content is None or content.parent != parent or content.token_ids != token_ids:
            return None
        return block_id

    def lineage(self, block_id: int) -> int:
        """The number of a registered block's content, to look up or register what follows it."""
        content = self._content[block_id]
        if content is None:
            raise PoolError(f"block {block_id} has no registered content")
        return content.number

    def register(
        self, block_id: int, block_hash: bytes, token_ids: tuple[int, ...], parent: Lineage
    ) -> int:
        """Makes a used, fully written block reusable and returns its lineage number.

        To be called only after the step that wrote the block has ended. When another block already
        holds the same content, that one stays the reusable one and its number is returned.
        """
        if self.references[block_id] == 0:
            raise PoolError(f"block {block_id} is not in use and cannot be registered")
        holder = self.lookup(block_hash, token_ids, parent)
        if holder is not None:
            return self.lineage(holder)
        self._forget(self._index.get(block_hash))
        number = self._next_number
        self._next_number += 1
        self._content[block_id] = _Content(block_hash, token_ids, parent, number)
        self._index[block_hash] = block_id
        if self._record_events:
            self._events.append((True, block_hash))
        return number

    def take_events(self) -> list[tuple[bool, bytes]]:
        """Changes of the reusable content since the last call: (stored?, hash)."""
        events, self._events = self._events, []
        return events

    def cached_hashes(self) -> list[bytes]:
        """Hashes of all reusable content, used blocks included."""
        return list(self._index)

    def reset_cache(self) -> None:
        """Forgets all reusable content; blocks in use stay in use."""
        for block_id in list(self._index.values()):
            self._forget(block_id)

    def check(self) -> None:
        """Raises PoolError unless every block is in exactly one state and the index is true."""
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free) or free & cached:
            raise PoolError("a block is in two states at once")
        for block_id, references in enumerate(self.references):
            idle = block_id in free or block_id in cached
            if references < 0 or (references == 0) != idle:
                raise PoolError(f"block {block_id}: {references} references, idle={idle}")
            if block_id in free and self._content[block_id] is not None:
                raise PoolError(f"free block {block_id} kept its content")
            if block_id in cached and self._content[block_id] is None:
                raise PoolError(f"cached block {block_id} has no content")
        for block_hash, block_id in self._index.items():
            content = self._content[block_id]
            if content is None or content.block_hash != block_hash:
                raise PoolError(f"the index names block {block_id} under a wrong hash")
        if sum(content is not None for content in self._content) != len(self._index):
            raise PoolError("a block's content is missing from the index")

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._drop_content(block_id)
        return block_id

    def _forget(self, block_id: int | None) -> None:
        """Drops a block's reusable content, whoever uses the block."""
        if block_id is None:
            return
        self._drop_content(block_id)
        if self.references[block_id] == 0:
            del self._cached[block_id]
            self._free.append(block_id)

    def _drop_content(self, block_id: int) -> None:
        content = self._content[block_id]
        if content is None:
            raise PoolError(f"block {block_id} has no content to drop")
        del self._index[content.block_hash]
        self._content[block_id] = None
        if self._record_events:
            self._events.append((False, content.block_hash))
