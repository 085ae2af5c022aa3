"""A router dies under its clients: they go on through another one, and the text is the same."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from legato.client import Client
from legato.errors import LegatoError

from tests.local_fleet import Fleet, fleet, until
from tests.wire import Wire

pytestmark = pytest.mark.timeout(60)

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled without a seed": {"temperature": 1.0},
    "two choices": {"n": 2, "temperature": 1.0, "seed": 4},
    "stop strings": {"n": 2, "temperature": 1.0, "seed": 9, "stop": ["qui", "ove"]},
    "log probabilities": {"logprobs": 2},
    "a text": {"token_ids": None, "prompt": "Hello world"},
    "no max_tokens": {"max_tokens": None},
}


@contextlib.asynccontextmanager
async def wired(running: Fleet) -> AsyncIterator[tuple[Client, list[Wire]]]:
    """A client that reaches each router through a wire of its own."""
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire(r.port)) for r in running.routers]
        address = ",".join(wire.address for wire in wires)
        yield await stack.enter_async_context(Client(address)), wires


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_goes_on_through_the_other_router(model_dir: Path, kind: str) -> None:
    """Ids, text, log probabilities and reasons equal those of the undisturbed answer; the seed that
    the first router chose holds."""
    fields: dict[str, Any] = {"token_ids": [5, 6], "max_tokens": 120, "ignore_eos": True} | KINDS[
        kind
    ]
    worker = {"max_model_len": 400}
    async with fleet(model_dir, num_workers=2, num_routers=2, worker=worker) as running:
        async with wired(running) as (client, wires):
            deltas = []
            async with client.stream(**fields) as stream:
                async for delta in stream:
                    deltas.append(delta)
                    if sum(len(d.ids) for d in deltas) >= 40 and wires[0]._listener:
                        assert stream.num_resumes == 0
                        wires[0].close()
                assert stream.num_resumes == 1
                assert stream.admitted is not None and stream.finished is not None
                seed = stream.admitted.seed
                finished = stream.finished
            alone = await client.generate(**fields | {"seed": seed})
            for choice in alone.choices:
                number = alone.choices.index(choice)
                own = [d for d in deltas if d.choice == number]
                assert tuple(i for d in own for i in d.ids) == choice.ids
                assert "".join(d.text for d in own) == choice.text
                assert own[-1].finish_reason == choice.finish_reason
                assert own[-1].stop_string == choice.stop_string
                assert tuple(e for d in own for e in d.logprobs) == choice.logprobs
            assert finished.usage.completion_tokens == alone.usage.completion_tokens
        await running.until_idle()


async def test_every_moment_of_an_answer(model_dir: Path) -> None:
    """The connection breaks after each number of tokens, the last one and the end included."""
    fields: dict[str, Any] = {"token_ids": [5], "max_tokens": 12, "ignore_eos": True}
    async with fleet(model_dir, num_routers=2) as running, wired(running) as (client, wires):
        alone = await client.generate(**fields)
        for moment in range(1, 13):
            text = []
            async with client.stream(**fields) as stream:
                async for delta in stream:
                    text.append(delta.text)
                    if delta.start_index + len(delta.ids) == moment:
                        for wire in wires:
                            wire.cut()
            assert "".join(text) == alone.text, moment
            assert stream.finished is not None
            assert stream.finished.usage.completion_tokens == 12
        await running.until_idle()


async def test_routers_with_other_keys_do_not_take_the_token(model_dir: Path) -> None:
    """A resume at a router that does not share the key is refused, not answered wrongly."""
    async with (
        fleet(model_dir, num_routers=1) as first,
        fleet(model_dir, num_routers=1, router={"resume_key": "x" * 20}) as second,
    ):
        async with Wire(first.routers[0].port) as wire:
            client = Client(f"{wire.address},127.0.0.1:{second.routers[0].port}")
            async with client.stream(token_ids=[1], max_tokens=3000, ignore_eos=True) as stream:
                await anext(stream)
                wire.close()
                with pytest.raises(LegatoError) as caught:
                    async for _ in stream:
                        pass
            assert caught.value.reason == "RESUME_INVALID"
            await client.aclose()
        await until(lambda: not first.held() and not second.held())
