"""One router's Attach stream, seen from the worker."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from legato.v1 import worker_pb2 as pb

MAX_PENDING = 256
"""Frames that wait to be written when hints are left out."""


@dataclass(slots=True)
class PartialPrompt:
    """A prompt that is still arriving in parts."""

    submit: pb.Submit
    prompt_ids: list[int] = field(default_factory=list)


class RouterLink:
    """Requests of one router, and the frames waiting to be written to it. Belongs to the event
    loop; one task writes, so frames leave in the order in which they were pushed.

    Memory is bounded, also for a router that does not read: it gets no more tokens than its
    requests have credit for, only the latest snapshot, and no more hints.
    """

    def __init__(self, router_id: str, *, kv_events: bool) -> None:
        self.router_id = router_id
        self.wants_kv_events = kv_events
        self.keys: dict[int, int] = {}  # rid -> engine key
        self.partial: dict[int, PartialPrompt] = {}
        self.last_applied_seq = 0
        self.kv_seq = 0
        self._decided: deque[tuple[int, int]] = deque()  # (engine key or 0 when refused, seq)
        self._frames: deque[pb.WorkerFrame] = deque()
        self._ready = asyncio.Event()
        self._closed = False

    def decided(self, key: int, seq: int) -> None:
        """A Submit was accepted under ``key``, or refused (key 0)."""
        self._decided.append((key, seq))

    def applied(self, last_key: int) -> None:
        """The engine's counters now include every request up to ``last_key``."""
        while self._decided and self._decided[0][0] <= last_key:
            self.last_applied_seq = self._decided.popleft()[1]

    def push(self, frame: pb.WorkerFrame) -> None:
        pending = self._frames
        if frame.HasField("snapshot") and pending and pending[-1].HasField("snapshot"):
            pending[-1] = frame  # an older one is of no use
        else:
            pending.append(frame)
        self._ready.set()

    def push_hint(self, frame: pb.WorkerFrame) -> None:
        """A frame whose loss its receiver notices and repairs (KvEvents, by their numbers)."""
        if len(self._frames) < MAX_PENDING:
            self.push(frame)

    def close(self) -> None:
        """No frame after those pushed so far."""
        self._closed = True
        self._ready.set()

    async def next_frame(self) -> pb.WorkerFrame | None:
        """The next frame to write; None when the link is closed and all are written."""
        while not self._frames:
            if self._closed:
                return None
            self._ready.clear()
            await self._ready.wait()
        return self._frames.popleft()
