"""Whose request is whose: from the engine's keys to routers' links, and back as frames."""

from __future__ import annotations

import asyncio

from legato.v1 import worker_pb2 as pb

from . import frames
from .core.output import StepOutput
from .link import RouterLink


class Routes:
    """Owner of the way from each open request's key to its link and the router's name for it.
    ``empty`` is set while there is none. Belongs to the event loop."""

    def __init__(self) -> None:
        self._routes: dict[int, tuple[RouterLink, int]] = {}
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, key: int, link: RouterLink, rid: int) -> None:
        self._routes[key] = (link, rid)
        link.keys[rid] = key
        self.empty.clear()

    def remove_link(self, link: RouterLink) -> list[int]:
        """The keys of the requests that ended with their link."""
        keys = list(link.keys.values())
        link.keys.clear()
        for key in keys:
            self._remove(key)
        return keys

    def to_steps(self, output: StepOutput) -> dict[RouterLink, pb.Step]:
        """One frame per link that the output concerns. Requests that ended leave."""
        routes = self._routes
        columns: dict[RouterLink, frames.StepColumns] = {}
        for position, key in enumerate(output.keys):
            route = routes.get(key)
            if route is None:
                continue  # its link is gone
            link, rid = route
            column = columns.get(link)
            if column is None:
                column = columns[link] = frames.StepColumns()
            column.rids.append(rid)
            column.choices.append(output.choices[position])
            column.starts.append(output.indices[position])
            column.ids.append(output.ids[position])
            if position in output.logprobs:
                column.logprobs[len(column.ids) - 1] = output.logprobs[position]
        for key, entries in output.prompt_logprobs.items():
            if key in routes:
                link, rid = routes[key]
                columns.setdefault(link, frames.StepColumns()).prompt_logprobs[rid] = entries
        steps = {link: column.to_step(output.step) for link, column in columns.items()}
        for key, choice, reason in output.ended_choices:
            if key in routes:
                link, rid = routes[key]
                step = steps.setdefault(link, pb.Step(step=output.step))
                step.ended_choices.add(rid=rid, choice=choice, reason=int(reason))
        for request in output.ended:
            if request.key in routes:
                link, rid = routes[request.key]
                del link.keys[rid]
                step = steps.setdefault(link, pb.Step(step=output.step))
                step.ended.append(frames.ended(rid, request))
                self._remove(request.key)
        return steps

    def _remove(self, key: int) -> None:
        del self._routes[key]
        if not self._routes:
            self.empty.set()
