"""Which blocks a sequence holds: prefix match, growth, copy-on-write, and the step fence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .block_pool import BlockPool
from .sequence import Sequence

BlockHash = Callable[[bytes, tuple[int, ...]], bytes]


class KVCacheManager:
    """Gives blocks to sequences and takes them back. The only caller of the pool.

    Step fence: blocks (and the slot) of a sequence that leaves while a launched step still works on
    it come back when that step has ended, never before (faults B017, B031). They are counted as
    ``num_fenced`` meanwhile.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        block_hash: BlockHash,
        *,
        prefix_cache: bool = True,
    ) -> None:
        self.pool = pool
        self._references = pool.references
        self.block_size = block_size
        self._block_hash = block_hash
        self._prefix_cache = prefix_cache
        self._fenced: deque[tuple[int, list[int], int]] = deque()
        self._computing: dict[bytes, int] = {}
        self.num_fenced = 0
        self.completed_step = 0

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's leading full blocks, without taking them.

        The last known token is always left to compute, since its logits are needed; so a full hit
        never writes into a shared block (fault B065).
        """
        if not self._prefix_cache or sequence.owner.request.sampling.prompt_logprobs is not None:
            return []
        size, matched = self.block_size, []
        parent: bytes | int = sequence.owner.request.cache_root
        for index in range((len(sequence.token_ids) - 1) // size):
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            block_id = self.pool.lookup(self._hash_of(sequence, index), tokens, parent)
            if block_id is None:
                break
            matched.append(block_id)
            parent = self.pool.lineage(block_id)
        return matched

    def computing_next_block(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a running sequence is computing the block after the matched ones right now, so
        that waiting for it saves computing it twice."""
        if not self._prefix_cache or sequence.owner.request.sampling.prompt_logprobs is not None:
            return False
        if num_matched >= (len(sequence.token_ids) - 1) // self.block_size:
            return False
        return self._hash_of(sequence, num_matched) in self._computing

    def num_missing(self, matched: list[int], num_tokens: int) -> tuple[int, int]:
        """(new blocks needed, matched blocks that are idle now and would leave the available ones)
        to hold ``num_tokens``."""
        idle = sum(self._references[block_id] == 0 for block_id in matched)
        return -(-num_tokens // self.block_size) - len(matched), idle

    def admit(self, sequence: Sequence, matched: list[int]) -> bool:
        """Gives the sequence its matched blocks and new ones for all its known tokens, or
        nothing."""
        self.pool.share(matched)
        need = -(-len(sequence.token_ids) // self.block_size) - len(matched)
        blocks = self.pool.allocate(need)
        if blocks is None:
            self.pool.release(matched)
            return False
        sequence.block_ids = matched + blocks
        sequence.num_computed = len(matched) * self.block_size
        sequence.num_registered = len(matched)
        sequence.lineage = (
            self.pool.lineage(matched[-1]) if matched else sequence.owner.request.cache_root
        )
        if self._prefix_cache:
            for index in range(len(matched), len(sequence.token_ids) // self.block_size):
                key = self._hash_of(sequence, index)
                self._computing[key] = self._computing.get(key, 0) + 1
        return True

    def is_writable(self, sequence: Sequence) -> bool:
        """Whether the position ``num_computed`` lies in a block that no other sequence shares;
        otherwise ``append`` has to get one."""
        index = sequence.num_computed // self.block_size
        blocks = sequence.block_ids
        return index < len(blocks) and self._references[blocks[index]] == 1

    def append(self, sequence: Sequence, step: int) -> tuple[int, int, int] | None:
        """Makes position ``num_computed`` writable in ``step`` with one new block.

        Returns (table index, block id, copied-from block id or -1), or None when the pool is empty.
        """
        index = sequence.num_computed // self.block_size
        blocks = self.pool.allocate(1)
        if blocks is None:
            return None
        if index == len(sequence.block_ids):
            sequence.block_ids.append(blocks[0])
            return index, blocks[0], -1
        shared = sequence.block_ids[index]
        sequence.block_ids[index] = blocks[0]
        # The copy runs in this step, before any row writes; the source keeps this reference until
        # the step has ended, so that it cannot be handed out and overwritten first.
        self._fence(step, [shared], -1)
        return index, blocks[0], shared

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Shares all blocks of ``source`` with ``target``; whoever writes first copies."""
        self.pool.share(source.block_ids)
        target.block_ids = list(source.block_ids)
        target.num_computed = source.num_computed
        target.num_registered = source.num_registered
        target.lineage = source.lineage

    def register(self, sequence: Sequence, num_computed: int) -> None:
        """After the step that brought the sequence to ``num_computed``: its full blocks can be
        matched from now on (fault B070)."""
        size = self.block_size
        while (sequence.num_registered + 1) * size <= num_computed:
            index = sequence.num_registered
            sequence.num_registered += 1
            if not self._prefix_cache:
                continue
            key = self._hash_of(sequence, index)
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            block_id = sequence.block_ids[index]
            sequence.lineage = self.pool.register(block_id, key, tokens, sequence.lineage)
            self._computed(key)

    def free(self, sequence: Sequence, slot: int) -> list[int]:
        """Takes back all blocks; returns the slots that are free again now."""
        if self._prefix_cache:
            known = len(sequence.token_ids) // self.block_size
            for index in range(sequence.num_registered, min(known, len(sequence.block_ids))):
                self._computed(self._hash_of(sequence, index))
        blocks, sequence.block_ids = sequence.block_ids, []
        sequence.num_registered = 0
        sequence.num_computed = 0
        return self._fence(sequence.last_step, blocks, slot)

    def complete(self, step: int) -> list[int]:
        """The step has ended: what it fenced comes back. Returns the slots that are free again."""
        self.completed_step = step
        slots = []
        while self._fenced and self._fenced[0][0] <= step:
            _, blocks, slot = self._fenced.popleft()
            self.num_fenced -= len(blocks)
            self.pool.release(blocks)
            if slot >= 0:
                slots.append(slot)
        return slots

    def check(self, running: list[Sequence]) -> None:
        """Raises unless each reference is a running sequence's or a fenced one."""
        self.pool.check()
        held = [0] * self.pool.num_blocks
        for sequence in running:
            for block_id in sequence.block_ids:
                held[block_id] += 1
        for _, blocks, _ in self._fenced:
            for block_id in blocks:
                held[block_id] += 1
        for block_id, count in enumerate(held):
            if count != self._references[block_id]:
                raise AssertionError(
                    f"block {block_id}: {count} holders, {self._references[block_id]} references"
                )
        if not running and self._computing:
            raise AssertionError("blocks are being computed although nothing runs")

    def _hash_of(self, sequence: Sequence, index: int) -> bytes:
        hashes, size = sequence.block_hashes, self.block_size
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else sequence.owner.request.cache_root
            start = len(hashes) * size
            hashes.append(self._block_hash(parent, tuple(sequence.token_ids[start : start + size])))
        return hashes[index]

    def _computed(self, key: bytes) -> None:
        count = self._computing.get(key, 0)
        if count <= 1:
            self._computing.pop(key, None)
        else:
            self._computing[key] = count - 1

    def _fence(self, step: int, blocks: list[int], slot: int) -> list[int]:
        if step <= self.completed_step:
            self.pool.release(blocks)
            return [slot] if slot >= 0 else []
        self.num_fenced += len(blocks)
        self._fenced.append((step, blocks, slot))
        return []
