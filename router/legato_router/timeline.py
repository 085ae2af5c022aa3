"""What happened to recent requests and when, for ``Explain``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from legato.v1 import inference_pb2 as pb

MAX_EVENTS = 64


class Timeline:
    """Events of one request; durations from its arrival. No prompt text."""

    __slots__ = ("_clock", "arrival_s", "events")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.arrival_s = clock()
        self.events: list[pb.TimelineEvent] = []
        self.add("received")

    def elapsed_s(self) -> float:
        return self._clock() - self.arrival_s

    def add(self, name: str, **attributes: object) -> None:
        if len(self.events) < MAX_EVENTS:
            text = {key: str(value) for key, value in attributes.items()}
            event = pb.TimelineEvent(at_s=self.elapsed_s(), name=name, attributes=text)
            self.events.append(event)


class TimelineStore:
    """The last ``capacity`` requests by key; older ones are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def keep(self, key: str, timeline: Timeline) -> None:
        self._timelines[key] = timeline
        while len(self._timelines) > self._capacity:
            self._timelines.popitem(last=False)

    def get(self, key: str) -> Timeline | None:
        return self._timelines.get(key)
