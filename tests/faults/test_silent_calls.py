"""Calls that never ask for anything take no place and hold up nothing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.local_fleet import fleet

pytestmark = pytest.mark.timeout(60)


async def test_silent_calls_take_no_place_and_do_not_hold_up_a_drain(model_dir: Path) -> None:
    async with (
        fleet(model_dir, router={"max_requests": 4}) as running,
        running.stub() as stub,
        running.client() as client,
    ):
        silent = [stub.Generate() for _ in range(12)]
        await asyncio.gather(*[call.wait_for_connection() for call in silent])
        await asyncio.sleep(0.2)
        answer = await client.generate(token_ids=[1, 2], max_tokens=4, ignore_eos=True)
        assert len(answer.ids) == 4
        started = time.monotonic()
        router = running.routers[0]
        router.stop.set()
        await running.exit_code(router)
        assert time.monotonic() - started < 4
