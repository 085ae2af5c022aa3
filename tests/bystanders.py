"""Streams that run while a test does something bad to others, and must not notice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from legato.client import Client

from tests.local_fleet import Fleet

NUM_TOKENS = 400
REQUESTS: tuple[dict[str, Any], ...] = (
    {"token_ids": [11, 12, 13], "ignore_eos": True},
    {"token_ids": [21, 22, 23, 24], "ignore_eos": True, "temperature": 1.0, "seed": 5},
)


@contextlib.asynccontextmanager
async def bystanders(fleet: Fleet) -> AsyncIterator[None]:
    """Two streams are in the middle of their answers for as long as the block runs, a token at a
    time, and in the end equal their solo runs byte for byte."""
    async with fleet.client() as client:
        solo = [await client.generate(max_tokens=NUM_TOKENS, **r) for r in REQUESTS]
        begun = [asyncio.Event() for _ in REQUESTS]
        over = asyncio.Event()
        tasks = [
            asyncio.create_task(_stream(client, request, event, over))
            for request, event in zip(REQUESTS, begun, strict=True)
        ]
        async with asyncio.timeout(10):
            for event in begun:
                await event.wait()
        try:
            yield
            assert not any(task.done() for task in tasks), "the streams ended too soon to matter"
        finally:
            over.set()
        for alone, task in zip(solo, tasks, strict=True):
            async with asyncio.timeout(20):
                ids, text = await task
            assert (ids, text) == (list(alone.ids), alone.text)


async def _stream(
    client: Client, request: dict[str, Any], begun: asyncio.Event, over: asyncio.Event
) -> tuple[list[int], str]:
    ids: list[int] = []
    text = []
    async with client.stream(max_tokens=NUM_TOKENS, initial_credit=1, **request) as stream:
        async for delta in stream:
            ids += delta.ids
            text.append(delta.text)
            begun.set()
            if not over.is_set():
                await asyncio.sleep(0.006)  # slow enough not to end before the test does
            await stream.grant(NUM_TOKENS if over.is_set() else 1)
    return ids, "".join(text)
