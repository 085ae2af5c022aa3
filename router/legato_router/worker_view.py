"""What a router knows of a worker: its last pushed snapshot, and what it has not applied yet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from legato.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Load:
    """A request as placement sees it."""

    blocks: int
    prompt_tokens: int


@dataclass(slots=True)
class WorkerView:
    """Snapshot plus own submits with ``seq > last_applied_seq``: nothing is missed or counted
    twice, however fast requests come (fault B080). Owned by the worker's link."""

    model: pb.ModelSpec
    snapshot: pb.Snapshot
    unapplied: OrderedDict[int, Load] = field(default_factory=OrderedDict)
    unapplied_blocks: int = 0
    unapplied_tokens: int = 0
    full: bool = False
    """It refused a request for want of room, and has sent no newer numbers since."""

    def submitted(self, seq: int, load: Load) -> None:
        self.unapplied[seq] = load
        self.unapplied_blocks += load.blocks
        self.unapplied_tokens += load.prompt_tokens

    def settle(self, seq: int) -> None:
        """The submit was refused, or its request is over."""
        load = self.unapplied.pop(seq, None)
        if load is not None:
            self.unapplied_blocks -= load.blocks
            self.unapplied_tokens -= load.prompt_tokens

    def update(self, snapshot: pb.Snapshot) -> None:
        self.snapshot = snapshot
        self.full = False
        while self.unapplied and next(iter(self.unapplied)) <= snapshot.last_applied_seq:
            self.settle(next(iter(self.unapplied)))

    @property
    def num_waiting(self) -> int:
        """Requests that would be served before the next one, not yet running."""
        free_seats = max(0, self.model.max_num_seqs - self.snapshot.running)
        return self.snapshot.waiting + max(0, len(self.unapplied) - free_seats)

    @property
    def num_sequences(self) -> int:
        """Sequences there, running or not, and requests on their way."""
        return self.snapshot.running + self.snapshot.waiting + len(self.unapplied)

    def occupancy(self, blocks: int) -> float:
        """Share of the KV pool in use once a request of ``blocks`` is added; may pass 1."""
        used = self.snapshot.used_blocks + self.unapplied_blocks + blocks
        return used / max(1, self.model.num_blocks)
