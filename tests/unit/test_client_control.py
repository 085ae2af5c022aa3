"""Steering an answer under way: credit, cancellation, leaving early, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from legato.client import AnswerStream, Client, LegatoError, Reason
from legato.v1 import inference_pb2 as pb

from tests.fake_router import (
    FakeRouter,
    GenerateCall,
    Script,
    admitted,
    client_tasks,
    cut,
    delta,
    finished,
    hold,
    ids_of,
    no_task_left,
    refuse,
    text_of,
    until_cancel,
    until_credits,
)

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
async def no_task_outlives_its_test() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    await no_task_left(before)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.retry.FIRST_PAUSE_S", 0.01)


def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a test waits."""
    monkeypatch.setattr("legato.retry.FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr("legato.retry.MAX_PAUSE_S", 60.0)


# ---------------------------------------------------------------------------------------------
# Credit.


async def test_credit_is_sent_as_it_is_granted() -> None:
    script: Script = [
        admitted(),
        until_credits(3),
        delta(0, [1, 2, 3]),
        until_credits(3, 1, 2),
        delta(3, [4, 5, 6]),
        finished(),
    ]
    async with (
        FakeRouter(script) as router,
        Client(router.address) as client,
        client.stream("x", initial_credit=0) as stream,
    ):
        await router.call(0)
        await stream.grant(3)
        assert (await anext(stream)).ids == (1, 2, 3)
        await stream.grant(1)
        await stream.grant(2)
        assert [d.ids async for d in stream] == [(4, 5, 6)]
        await stream.grant(1)  # after the end: nothing
    assert router.calls[0].request.HasField("initial_credit")
    assert router.calls[0].credits == [3, 1, 2]


async def test_credit_left_is_carried_over_to_the_next_call() -> None:
    first: Script = [admitted(), delta(0, [1]), until_credits(4), delta(1, [2, 3]), cut]
    second: Script = [admitted(), until_credits(5), delta(3, [4]), finished()]
    async with (
        FakeRouter(first, second) as router,
        Client(router.address) as client,
        client.stream("x", initial_credit=2) as stream,
    ):
        await stream.grant(1)
        assert (await anext(stream)).ids == (1,)
        await stream.grant(4)
        assert (await anext(stream)).ids == (2, 3)
        await router.call(1)
        await stream.grant(5)
        assert [d.ids async for d in stream] == [(4,)]
    # A grant before the call began is part of its initial credit.
    assert [call.request.initial_credit for call in router.calls] == [2 + 1, 2 + 1 + 4 - 3]


async def test_grants_that_make_no_sense_are_refused() -> None:
    client = Client()
    with pytest.raises(LegatoError) as caught:
        await client.stream("x").grant(1)
    assert caught.value.field == "initial_credit"
    for tokens in (0, -1, 2**32):
        with pytest.raises(LegatoError) as caught:
            await client.stream("x", initial_credit=1).grant(tokens)
        assert caught.value.field == "credit.tokens"


# ---------------------------------------------------------------------------------------------
# Cancel and leaving early.

CANCELLED = finished(pb.FINISH_REASON_CANCELLED, completion_tokens=1)


async def test_cancel_before_the_first_frame() -> None:
    async with (
        FakeRouter([until_cancel, admitted(), CANCELLED]) as router,
        Client(router.address) as client,
        client.stream("x") as stream,
    ):
        await router.call(0)
        await stream.cancel("changed my mind")
        assert [d async for d in stream] == []
        assert stream.finished is not None
        assert stream.finished.reason == pb.FINISH_REASON_CANCELLED
    assert router.calls[0].cancel_cause == "changed my mind"
    assert not router.calls[0].cancelled


async def test_cancel_mid_stream_still_gives_the_last_deltas_and_usage() -> None:
    script: Script = [admitted(), delta(0, [1]), until_cancel, delta(1, [2], "tail"), CANCELLED]
    async with (
        FakeRouter(script) as router,
        Client(router.address) as client,
        client.stream("x") as stream,
    ):
        deltas = []
        async for d in stream:
            deltas.append(d)
            await stream.cancel()
            await stream.cancel()  # once is enough
    assert ids_of(deltas) == [1, 2] and text_of(deltas) == "tail"
    assert stream.finished is not None and stream.finished.usage.completion_tokens == 1
    assert len(router.calls[0].frames) == 1


async def test_cancel_answered_by_a_status() -> None:
    script: Script = [admitted(), until_cancel, refuse(LegatoError(Reason.CANCELLED, "as asked"))]
    async with FakeRouter(script) as router, Client(router.address) as client:
        stream = client.stream("x")
        await stream.cancel()
        assert [d async for d in stream] == []
        assert router.calls == []  # cancelled before it began: no call at all
        async with client.stream("x") as stream:
            await router.call(0)
            await stream.cancel()
            assert [d async for d in stream] == []
            assert stream.finished is None


async def test_a_cancelled_answer_is_not_resumed() -> None:
    async with (
        FakeRouter([admitted(), until_cancel, cut]) as router,
        Client(router.address) as client,
        client.stream("x") as stream,
    ):
        await router.call(0)
        await stream.cancel()
        assert [d async for d in stream] == []
    assert len(router.calls) == 1


async def test_cancel_during_a_pause_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    long_pauses(monkeypatch)
    async with (
        FakeRouter([admitted(), delta(0, [1]), cut]) as router,
        Client(router.address) as client,
        client.stream("x") as stream,
    ):
        await anext(stream)
        async with asyncio.timeout(10):
            while not stream.num_resumes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await stream.cancel()
            assert [d async for d in stream] == []
    assert len(router.calls) == 1


@pytest.mark.parametrize("state", ["before the first frame", "mid-stream", "half-closed"])
async def test_a_cancelled_task_cancels_the_call(state: str) -> None:
    script: Script = [admitted(), delta(0, [1]), hold]
    if state == "before the first frame":
        script = [hold]
    async with FakeRouter(script) as router, Client(router.address) as client:
        seen = asyncio.Event()

        async def consume() -> None:
            if state == "half-closed":
                await client.generate("x")
            async for _ in client.stream("x"):
                seen.set()

        task = asyncio.create_task(consume())
        call = await router.call(0)
        if state == "mid-stream":
            await seen.wait()
        if state == "half-closed":
            await call.until(lambda: call.half_closed)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client_tasks() == []
        await asyncio.wait_for(call.ended.wait(), 5)
        assert call.cancelled


@pytest.mark.parametrize("how", ["break", "raise", "return"])
async def test_leaving_the_loop_cancels_the_call(how: str) -> None:
    async def leave(client: Client) -> None:
        stream = client.stream("x")
        async for _ in stream:
            if how == "break":
                break
            if how == "return":
                return
            raise KeyError
        # Also while the stream itself is still held.
        await asyncio.wait_for(router.calls[0].ended.wait(), 5)
        with pytest.raises(LegatoError, match="closed before its answer ended"):
            await anext(stream)

    async with (
        FakeRouter([admitted(), delta(0, [1]), hold]) as router,
        Client(router.address) as client,
    ):
        try:
            await leave(client)
        except KeyError:
            assert how == "raise"
        await asyncio.wait_for(router.calls[0].ended.wait(), 5)
        assert router.calls[0].cancelled
        assert client_tasks() == []


async def test_closing_before_the_router_answers_and_twice() -> None:
    async with FakeRouter([hold]) as router, Client(router.address) as client:
        async with client.stream("x") as stream:
            pass  # left before the call got anywhere
        await stream.aclose()
        async with client.stream("x") as stream:
            call = await router.call(len(router.calls))
            await asyncio.gather(stream.aclose(), stream.aclose())
        await asyncio.wait_for(call.ended.wait(), 5)
        assert client_tasks() == []
        never_used = client.stream("x")
        await never_used.aclose()
        with pytest.raises(LegatoError):
            await anext(never_used)


async def test_a_timed_out_anext_loses_nothing() -> None:
    go = asyncio.Event()

    async def wait(call: GenerateCall) -> None:
        await go.wait()

    script: Script = [admitted(), wait, delta(0, [1]), delta(1, [2]), finished()]
    async with (
        FakeRouter(script) as router,
        Client(router.address) as client,
        client.stream("x") as stream,
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        go.set()
        assert [d.ids async for d in stream] == [(1,), (2,)]
    assert len(router.calls) == 1 and not router.calls[0].cancelled


async def test_closing_the_client_ends_its_streams() -> None:
    async with FakeRouter([admitted(), delta(0, [1]), hold]) as router:
        client = Client(router.address)
        stream = client.stream("x")
        await anext(stream)
        waiting = asyncio.create_task(client.generate("y"))
        await router.call(1)
        await client.aclose()
        for closed in (anext(stream), waiting, client.generate("z"), client.list_models()):
            with pytest.raises(LegatoError) as caught:
                await closed
            assert caught.value.reason is Reason.CANCELLED
        assert client_tasks() == []


async def test_closing_the_client_ends_a_pause_between_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_pauses(monkeypatch)
    async with FakeRouter([admitted(), delta(0, [1]), cut]) as router:
        client = Client(router.address)
        stream = client.stream("x")
        async with asyncio.timeout(10):
            await anext(stream)
            while not stream.num_resumes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await client.aclose()
            with pytest.raises(LegatoError) as caught:
                await anext(stream)
            assert caught.value.reason is Reason.CANCELLED


async def test_closing_the_client_ends_a_unary_call() -> None:
    async with FakeRouter() as router:
        client = Client(router.address)
        asking = asyncio.create_task(client.list_models())
        async with asyncio.timeout(10):
            while not router.unary_requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await client.aclose()
            with pytest.raises(LegatoError) as caught:
                await asking
            assert caught.value.reason is Reason.CANCELLED


async def test_a_connection_lost_while_closing_is_not_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss is noticed first, but acted upon after ``aclose`` began."""
    long_pauses(monkeypatch)
    read = AnswerStream._read
    closing: list[asyncio.Task[None]] = []

    async def read_then_close(self: AnswerStream, call: Any) -> object:
        try:
            return await read(self, call)
        except grpc.aio.AioRpcError:
            self._reading = call
            closing.append(asyncio.create_task(self.aclose()))
            await asyncio.sleep(0)
            raise

    monkeypatch.setattr(AnswerStream, "_read", read_then_close)
    async with FakeRouter([admitted(), cut]) as router, Client(router.address) as client:
        async with asyncio.timeout(5):
            with pytest.raises(LegatoError):
                await anext(client.stream("x"))
            await closing[0]
    assert len(router.calls) == 1


async def test_many_streams_left_early_leave_nothing_behind() -> None:
    async with (
        FakeRouter([admitted(), delta(0, [1]), hold]) as router,
        Client(router.address) as client,
    ):

        async def leave() -> None:
            async for _ in client.stream("x"):
                break

        await asyncio.gather(*(leave() for _ in range(50)))
        for call in router.calls:
            await asyncio.wait_for(call.ended.wait(), 5)
        assert client_tasks() == []
    assert len(router.calls) == 50
