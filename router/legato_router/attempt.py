"""One request on one worker: what its link tells it, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from legato.v1 import inference_pb2, worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Accepted:
    frame: pb.Accepted


@dataclass(frozen=True, slots=True)
class Refused:
    frame: pb.Nack


@dataclass(slots=True)
class Tokens:
    """New ids of one choice, the first being number ``start_index`` of the answer."""

    choice: int
    start_index: int
    ids: list[int]
    logprobs: list[inference_pb2.TokenLogprobs]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    entries: Sequence[inference_pb2.TokenLogprobs]


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    choice: int
    reason: int


@dataclass(frozen=True, slots=True)
class Ended:
    frame: pb.Ended


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker, or the way to it, is gone."""

    cause: str


Event = Accepted | Refused | Tokens | PromptLogprobs | ChoiceEnded | Ended | Lost


class Attempt:
    """Filled by the worker's link, drained by the request's relay. ``seq`` names the Submit.

    Holds at most the request's credit in tokens. After Refused, Ended or Lost nothing follows.
    """

    __slots__ = ("_events", "_wake", "rid", "seq", "worker")

    def __init__(self, rid: int, seq: int, worker: str) -> None:
        self.rid = rid
        self.seq = seq
        self.worker = worker
        self._events: deque[Event] = deque()
        self._wake: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        events = self._events
        if isinstance(event, Tokens) and events:
            # What the reader has not taken yet goes out as one message: a loop that lags costs
            # fewer messages, not more delay.
            last = events[-1]
            if (
                isinstance(last, Tokens)
                and last.choice == event.choice
                and last.start_index + len(last.ids) == event.start_index
            ):
                last.ids += event.ids
                last.logprobs += event.logprobs
                return
        events.append(event)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def next_event(self) -> Event:
        """The next event; one caller at a time."""
        while not self._events:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self._events.popleft()
