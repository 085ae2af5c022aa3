"""Answers that connections break: resumed without gap or duplicate, within bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from legato.client import Client, LegatoError, Reason
from legato.routers import Routers
from legato.v1 import inference_pb2 as pb

from tests.fake_router import (
    BUSY,
    HELLO,
    FakeRouter,
    GenerateCall,
    Script,
    Step,
    admitted,
    client_tasks,
    cut,
    delta,
    die,
    finished,
    hold,
    ids_of,
    no_task_left,
    refuse,
    reset,
    text_of,
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


PIECES = ["Once ", "", "upon", " a ", "tïme", ",", " dear", "."]


def answer_of(n: int) -> list[pb.ServerFrame]:
    """The frames of one undisturbed answer, choices taking turns, ids by one and by two."""
    frames = []
    for index, piece in enumerate(PIECES):
        for choice in range(n):
            start = 2 * index
            base = 1000 * choice
            last = index == len(PIECES) - 1
            frames.append(
                delta(
                    start,
                    [base + start, base + start + 1],
                    f"{choice}{piece}",
                    choice=choice,
                    finish_reason=pb.FINISH_REASON_LENGTH if last else 0,
                )
            )
    return frames


def serve(n: int, cut_after: int | None, break_by: Step = cut) -> Script:
    """Serves what the request's resume point does not hold; breaks after some frames."""

    def script(call: GenerateCall) -> list[Step]:
        held = {c.choice: len(c.ids) for c in call.request.resume.choices}
        left = [f for f in answer_of(n) if f.delta.start_index >= held.get(f.delta.choice, 0)]
        number = len(call.router.calls)
        token = f"{call.router.address}-{number}".encode()
        start: list[Step] = [admitted(f"key-{number}", token=token)]
        if cut_after is not None:
            return [*start, *left[:cut_after], break_by]
        return [*start, *left, finished(completion_tokens=2 * n * len(PIECES))]

    return script


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("cut_after", [0, 1, 2, 5, 7, 8])
async def test_an_answer_cut_off_goes_on_at_the_second_router(n: int, cut_after: int) -> None:
    async with FakeRouter(serve(n, None)) as calm, Client(calm.address) as client:
        undisturbed = [d async for d in client.stream("x", n=n)]
    async with (
        FakeRouter(serve(n, cut_after)) as a,
        FakeRouter(serve(n, None)) as b,
        Client(f"{a.address},{b.address}") as client,
        client.stream("x", n=n, seed=3) as stream,
    ):
        deltas = [d async for d in stream]
    assert deltas == undisturbed
    assert stream.num_resumes == 1
    assert stream.finished is not None and stream.finished.usage.completion_tokens == 16 * n
    assert len(a.calls) == 1 and len(b.calls) == 1
    # The same request again, and what is held of its answer.
    resumed = b.calls[0].request
    assert resumed.resume.resume_token == f"{a.address}-1".encode()
    held = {c.choice: list(c.ids) for c in resumed.resume.choices}
    sent = [f.delta for f in answer_of(n)[:cut_after]]
    assert held == {
        choice: [i for d in sent if d.choice == choice for i in d.ids]
        for choice in {d.choice for d in sent}
    }
    resumed.ClearField("resume")
    assert resumed == a.calls[0].request


async def test_each_router_in_turn_and_the_latest_token() -> None:
    async with (
        FakeRouter(serve(1, 2), serve(1, 2)) as a,
        FakeRouter(serve(1, 1), serve(1, None)) as b,
        Client(f"{a.address}, {b.address}") as client,
    ):
        answer = await client.generate("x")
    assert answer.text == "".join(f"0{piece}" for piece in PIECES)
    assert answer.ids == tuple(range(16))
    assert (len(a.calls), len(b.calls)) == (2, 2)
    tokens = [c.request.resume.resume_token.decode() for c in (*a.calls, *b.calls)]
    assert tokens == ["", f"{b.address}-1", f"{a.address}-1", f"{a.address}-2"]
    assert answer.admitted.request_key == "key-2"


async def test_a_lone_router_is_called_again() -> None:
    async with FakeRouter(serve(1, 3), serve(1, None)) as router, Client(router.address) as client:
        assert (await client.generate("x")).ids == tuple(range(16))
    assert router.num_connections == 2


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED]
)
async def test_a_reset_by_the_transport_is_a_lost_call(code: grpc.StatusCode) -> None:
    async with (
        FakeRouter(serve(1, 3, reset(code)), serve(1, None)) as router,
        Client(router.address) as client,
    ):
        assert (await client.generate("x")).ids == tuple(range(16))
    assert len(router.calls) == 2


async def test_before_admitted_the_request_is_sent_again() -> None:
    async with (
        FakeRouter([cut]) as a,
        FakeRouter(HELLO) as b,
        Client(f"{a.address},{b.address}") as client,
    ):
        assert (await client.generate("x")).text == "Hello"
    assert b.calls[0].request == a.calls[0].request
    assert not b.calls[0].request.HasField("resume")


async def test_a_dead_router_is_passed_over_once_known() -> None:
    async with (
        FakeRouter([die]) as a,
        FakeRouter(HELLO) as b,
        Client(f"{a.address},{b.address}") as client,
    ):
        resumes = []
        for _ in range(6):
            stream = client.stream("x")
            assert text_of([d async for d in stream]) == "Hello"
            resumes.append(stream.num_resumes)
    assert (len(a.calls), len(b.calls)) == (1, 6)
    assert resumes == [1, 0, 0, 0, 0, 0]


async def test_who_is_asked_next_while_a_router_does_not_answer() -> None:
    """A silent address (it takes connections and says nothing) comes after a connected router,
    but before the one whose call just failed."""
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with FakeRouter() as router, silent:
        router.replies["ListModels"] = pb.ListModelsResponse()
        port = silent.sockets[0].getsockname()[1]
        routers = Routers(f"{router.address},localhost:{port}", tls=None, token="")
        number, stub = routers.pick()
        await stub.ListModels(pb.ListModelsRequest())
        assert number == 0
        assert [routers.pick()[0] for _ in range(3)] == [0, 0, 0]
        assert routers.pick(after=0)[0] == 1
        assert routers.pick(after=1)[0] == 0
        await routers.close()


async def test_calls_go_round_the_routers() -> None:
    async with (
        FakeRouter(HELLO) as a,
        FakeRouter(HELLO) as b,
        Client(f"{a.address},{b.address}") as client,
    ):
        async with asyncio.timeout(10):
            while not b.calls:  # until the first call there, it is being connected to
                await client.generate("x")
        before = len(a.calls)
        for _ in range(6):
            await client.generate("x")
    assert (len(a.calls) - before, len(b.calls)) == (3, 4)


async def test_resumes_are_bounded_and_the_last_error_is_told() -> None:
    async with FakeRouter(serve(1, 1)) as router, Client(router.address, max_resumes=2) as client:
        deltas = []
        with pytest.raises(LegatoError) as caught:
            async for d in client.stream("x"):
                deltas.append(d)  # noqa: PERF401 (the loop ends in an error)
        assert client_tasks() == []
    assert ids_of(deltas) == [0, 1, 2, 3, 4, 5]  # what came stands
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(router.calls) == 3


async def test_no_router_at_all() -> None:
    async with FakeRouter() as router:
        router.refuse_connections()
        async with Client(router.address) as client:
            start = time.monotonic()
            with pytest.raises(LegatoError) as caught:
                await client.generate("x", timeout_s=10)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - start < 5
            with pytest.raises(LegatoError):
                await client.list_models()
            assert client_tasks() == []


async def test_duplicates_of_a_resumed_call_are_dropped_and_a_gap_is_told() -> None:
    first: Script = [admitted(), delta(0, [1, 2], "ab"), cut]
    again: Script = [admitted(), delta(0, [1], "a"), delta(1, [2, 3], "c"), finished()]
    async with FakeRouter(first, again) as router, Client(router.address) as client:
        answer = await client.generate("x")
    assert (answer.ids, answer.text) == ((1, 2, 3), "abc")
    gap: Script = [admitted(), delta(3, [4], "d"), hold]
    async with FakeRouter(first, gap) as router, Client(router.address) as client:
        with pytest.raises(LegatoError, match="2 ids held, next starts at 3") as caught:
            await client.generate("x")
        assert caught.value.reason is Reason.INTERNAL
    assert len(router.calls) == 2


async def test_without_a_resume_token_a_cut_answer_is_an_error() -> None:
    script: Script = [admitted(token=b""), delta(0, [1]), cut]
    async with FakeRouter(script) as router, Client(router.address) as client:
        with pytest.raises(LegatoError) as caught:
            await client.generate("x")
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(router.calls) == 1


async def test_a_busy_router_does_not_end_a_resumed_answer() -> None:
    async with (
        FakeRouter(serve(1, 3), [refuse(BUSY)], serve(1, None)) as router,
        Client(router.address) as client,
        client.stream("x") as stream,
    ):
        assert ids_of([d async for d in stream]) == list(range(16))
    assert stream.num_resumes == 2
    held = [list(c.request.resume.choices[0].ids) for c in router.calls[1:]]
    assert held == [list(range(6))] * 2


async def test_the_objectives_deadline_shrinks_with_the_time_spent() -> None:
    no = refuse(LegatoError(Reason.INVALID_ARGUMENT, "must be > 0", "objective.deadline_s"))
    async with (
        FakeRouter(serve(1, 1), serve(1, None), [no]) as router,
        Client(router.address) as client,
    ):
        await client.generate("x", deadline_s=20.0)
        with pytest.raises(LegatoError):
            await client.generate("x", deadline_s=-1.0)
    assert router.calls.pop().request.objective.deadline_s == -1.0  # the router's to refuse
    first, second = (call.request.objective.deadline_s for call in router.calls)
    assert first == pytest.approx(20.0, abs=0.5)
    assert 15 < second < first - 0.02  # the script itself takes 0.02 s before it cuts
