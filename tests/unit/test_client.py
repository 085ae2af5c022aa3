"""The client against a scripted router: a real gRPC server behind a relay that can be cut."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import legato.client
import pytest
from legato.answer import FinishReason
from legato.client import Client, Delta, LegatoError, Reason, Tls
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
    finished,
    hold,
    ids_of,
    no_task_left,
    refuse,
    until_half_closed,
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


# ---------------------------------------------------------------------------------------------
# The surface.


def test_public_names_are_pinned() -> None:
    assert legato.client.__all__ == [
        "Answer",
        "AnswerStream",
        "Choice",
        "Client",
        "Delta",
        "FinishReason",
        "GenerateFields",
        "LegatoError",
        "Reason",
        "Tls",
    ]
    public = {name for name in vars(Client) if not name.startswith("_")}
    assert public == {"aclose", "explain", "generate", "list_models", "plan", "stream"}
    public = {name for name in vars(legato.client.AnswerStream) if not name.startswith("_")}
    assert public == {
        "aclose",
        "admitted",
        "cancel",
        "finished",
        "grant",
        "num_resumes",
        "request_key",
    }


def test_import_needs_grpc_and_protobuf_only() -> None:
    program = (
        "import sys, legato.client\n"
        "print(*sorted({name.partition('.')[0] for name, module in sys.modules.items()\n"
        "               if 'site-packages' in (getattr(module, '__file__', None) or '')}))\n"
    )
    folders = [Path(legato.client.__file__).parent.parent, sysconfig.get_path("purelib")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],  # without the start-up hooks of other packages
        env={"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=True,
    )
    third_party = set(done.stdout.split())
    assert "grpc" in third_party
    # gRPC imports packages of its own where they are installed; it does without.
    third_party -= {"grpc_health", "grpc_reflection", "grpc_tools"}
    assert third_party <= {"grpc", "google", "typing_extensions"}


# ---------------------------------------------------------------------------------------------
# Streaming.


async def test_deltas_come_in_order_between_admitted_and_finished() -> None:
    script = [
        admitted("key-9", worker="w", seed=5),
        delta(0, [1, 2], "He", prompt_logprobs=[pb.TokenLogprobs(rank=3)]),
        pb.ServerFrame(moved=pb.Moved(from_index=2)),
        pb.ServerFrame(),  # a kind of frame that this client does not know
        delta(2, [3], "llo", finish_reason=pb.FINISH_REASON_STOP_STRING, stop_string="!"),
        finished(pb.FINISH_REASON_STOP_STRING, completion_tokens=3),
    ]
    async with FakeRouter(script) as router, Client(router.address) as client:
        stream = client.stream("Hi", max_tokens=3)
        assert (stream.admitted, stream.finished, stream.request_key) == (None, None, "")
        first = await anext(stream)
        assert stream.request_key == "key-9" and stream.admitted is not None
        assert (stream.admitted.worker, stream.admitted.seed) == ("w", 5)
        rest = [d async for d in stream]
        assert [d async for d in stream] == []  # the end stays the end
    assert first == Delta(0, 0, (1, 2), "He", prompt_logprobs=(pb.TokenLogprobs(rank=3),))
    assert rest == [
        Delta(0, 2, (3,), "llo", finish_reason=FinishReason.STOP_STRING, stop_string="!")
    ]
    assert stream.finished is not None and stream.finished.usage.completion_tokens == 3
    assert stream.num_resumes == 0
    assert router.calls[0].request == pb.GenerateRequest(text="Hi", max_tokens=3)
    assert not router.calls[0].cancelled


async def test_the_first_delta_is_there_before_the_last_is_sent() -> None:
    go = asyncio.Event()

    async def wait(call: GenerateCall) -> None:
        await go.wait()

    script: Script = [admitted(), delta(0, [1], "a"), wait, delta(1, [2], "b"), finished()]
    async with FakeRouter(script) as router, Client(router.address) as client:
        seen: list[int] = []
        async for d in client.stream("x"):
            seen += d.ids
            go.set()  # without this the second delta never comes
        assert seen == [1, 2]


async def test_generate_joins_all_choices() -> None:
    entry = pb.TokenLogprobs(rank=1)
    script: Script = [
        admitted(),
        until_half_closed,  # nothing more to say, so the plain streaming shape
        delta(0, [5], "x", choice=1, logprobs=[entry]),
        delta(0, [1, 2], "He", prompt_logprobs=[entry, entry], logprobs=[entry, entry]),
        delta(2, [3], "llo", finish_reason=pb.FINISH_REASON_STOP, stop_string="s"),
        delta(1, [6], "y", choice=1),
        finished(pb.FINISH_REASON_DEADLINE, prompt_tokens=7, completion_tokens=5),
    ]
    async with FakeRouter(script) as router, Client(router.address) as client:
        answer = await client.generate(chat=[{"role": "user", "content": "Hi"}], n=3)
    assert (answer.text, answer.ids) == ("Hello", (1, 2, 3))
    assert answer.finish_reason is FinishReason.DEADLINE
    assert [c.text for c in answer.choices] == ["Hello", "xy", ""]
    assert [c.ids for c in answer.choices] == [(1, 2, 3), (5, 6), ()]
    assert [str(c.finish_reason) for c in answer.choices] == ["stop", "deadline", "deadline"]
    assert answer.choices[0].stop_string == "s"
    assert len(answer.choices[0].prompt_logprobs) == 2
    assert [len(c.logprobs) for c in answer.choices] == [2, 1, 0]
    assert answer.usage.prompt_tokens == 7
    assert answer.admitted.request_key == "key-1"


async def test_metadata_reaches_the_router() -> None:
    async with (
        FakeRouter(HELLO) as router,
        Client(router.address, token="secret", tenant="team-a") as client,
    ):
        await client.generate("x", request_id="r-7", traceparent="00-ab-cd-01", timeout_s=20)
    call = router.calls[0]
    assert call.request.request_id == "r-7"
    expected = {
        "authorization": "Bearer secret",
        "x-legato-tenant": "team-a",
        "x-request-id": "r-7",
        "traceparent": "00-ab-cd-01",
    }
    assert expected.items() <= call.metadata.items()


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ([admitted(), delta(0, [1])], "ended before its answer was finished"),
        ([delta(0, [1])], "delta came before admitted"),
        ([finished()], "finished came before admitted"),
        ([admitted(), delta(3, [1])], "gap"),
    ],
)
async def test_a_broken_contract_is_an_internal_error_and_ends_the_call(
    script: list[Step], what: str
) -> None:
    async with (
        FakeRouter([*script, hold] if what == "gap" else script) as router,
        Client(router.address) as client,
    ):
        with pytest.raises(LegatoError, match=what) as caught:
            await client.generate("x")
        assert caught.value.reason is Reason.INTERNAL
        await asyncio.wait_for(router.calls[0].ended.wait(), 5)
    assert len(router.calls) == 1


async def test_a_router_that_never_closes_its_call_does_not_hold_the_answer() -> None:
    async with FakeRouter([*HELLO, hold]) as router, Client(router.address) as client:
        start = time.monotonic()
        assert (await client.generate("x")).text == "Hello"
        assert time.monotonic() - start < 5
        await asyncio.wait_for(router.calls[0].ended.wait(), 5)


# ---------------------------------------------------------------------------------------------
# Refusals and deadlines.


async def test_a_typed_error_arrives_whole_and_is_not_retried() -> None:
    error = LegatoError(
        Reason.INVALID_ARGUMENT, "must be at most 8", "n", {"limit": "8", "observed": "9"}
    )
    async with FakeRouter([refuse(error)]) as router, Client(router.address) as client:
        with pytest.raises(LegatoError) as caught:
            await client.generate("x", n=9, retry_for_s=5)
    assert caught.value == error
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
    assert len(router.calls) == 1


@pytest.mark.parametrize("reason", [Reason.WORKER_LOST, Reason.QUARANTINED, Reason.INTERNAL])
async def test_a_typed_error_mid_stream_is_not_resumed(reason: Reason) -> None:
    script: Script = [admitted(), delta(0, [1]), refuse(LegatoError(reason, "over"))]
    async with FakeRouter(script) as router, Client(router.address) as client:
        stream = client.stream("x")
        assert (await anext(stream)).ids == (1,)
        for _ in range(2):  # the error stays the end
            with pytest.raises(LegatoError) as caught:
                await anext(stream)
            assert caught.value.reason is reason
    assert len(router.calls) == 1


async def test_a_refusal_is_raised_at_once_unless_asked_otherwise() -> None:
    async with (
        FakeRouter([refuse(BUSY)], [refuse(BUSY)], HELLO) as router,
        Client(router.address) as client,
    ):
        with pytest.raises(LegatoError) as caught:
            await client.generate("x")
        assert caught.value == BUSY
        assert len(router.calls) == 1
        start = time.monotonic()
        assert (await client.generate("x", retry_for_s=5)).text == "Hello"
        assert time.monotonic() - start >= 0.05
    assert len(router.calls) == 3


async def test_retry_for_s_is_a_bound() -> None:
    async with FakeRouter([refuse(BUSY)]) as router, Client(router.address) as client:
        start = time.monotonic()
        with pytest.raises(LegatoError) as caught:
            await client.generate("x", retry_for_s=1.0)
        assert time.monotonic() - start < 3
    assert caught.value == BUSY
    assert 2 <= len(router.calls) <= 20


async def test_a_draining_router_sends_its_callers_to_the_next() -> None:
    draining = refuse(LegatoError(Reason.DRAINING, "going away"))
    async with (
        FakeRouter([draining]) as a,
        FakeRouter(HELLO) as b,
        Client(f"{a.address},{b.address}") as client,
    ):
        assert (await client.generate("x")).text == "Hello"


async def test_the_deadline_ends_a_silent_answer() -> None:
    async with (
        FakeRouter([admitted(), delta(0, [1]), hold]) as router,
        Client(router.address) as client,
    ):
        start = time.monotonic()
        deltas = []
        with pytest.raises(LegatoError) as caught:
            async for d in client.stream("x", timeout_s=1.0):
                deltas.append(d)  # noqa: PERF401
        assert 0.9 < time.monotonic() - start < 4
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert ids_of(deltas) == [1]
        assert client_tasks() == []


async def test_the_deadline_spans_all_calls() -> None:
    left: list[float] = []

    def slow(call: GenerateCall) -> list[Step]:
        left.append(call.context.time_remaining())

        async def wait(call: GenerateCall) -> None:
            await asyncio.sleep(0.1)

        return [admitted(), wait, cut]

    async with FakeRouter(slow) as router, Client(router.address, max_resumes=99) as client:
        start = time.monotonic()
        with pytest.raises(LegatoError) as caught:
            await client.generate("x", timeout_s=1.0)
        assert time.monotonic() - start < 4
    assert caught.value.reason in (Reason.DEADLINE_EXCEEDED, Reason.NO_WORKER)
    assert len(left) >= 2
    assert all(b < a - 0.09 for a, b in itertools.pairwise(left))


# ---------------------------------------------------------------------------------------------
# The other methods, TLS, DNS.


async def test_plan_and_list_models() -> None:
    async with FakeRouter() as router, Client(f"{router.address}") as client:
        router.replies["Plan"] = pb.PlanResponse(admissible=True, blocks_needed=4)
        router.replies["ListModels"] = pb.ListModelsResponse(models=[pb.Model(name="m")])
        plan = await client.plan("Once", max_tokens=3)
        assert plan.admissible and plan.blocks_needed == 4
        assert router.unary_requests[0] == pb.GenerateRequest(text="Once", max_tokens=3)
        assert [m.name for m in await client.list_models()] == ["m"]
        router.replies["Plan"] = LegatoError(Reason.MODEL_NOT_FOUND, "no such model", "model")
        with pytest.raises(LegatoError) as caught:
            await client.plan("Once", model="x")
        assert (caught.value.reason, caught.value.field) == (Reason.MODEL_NOT_FOUND, "model")


async def test_unary_calls_go_past_a_dead_router() -> None:
    async with FakeRouter() as a, FakeRouter() as b:
        a.refuse_connections()
        b.replies["ListModels"] = pb.ListModelsResponse(models=[pb.Model(name="m")])
        async with Client(f"{a.address},{b.address}") as client:
            assert [m.name for m in await client.list_models()] == ["m"]


async def test_explain_asks_the_routers_until_one_knows() -> None:
    unknown = LegatoError(Reason.MODEL_NOT_FOUND, "no such request")
    async with FakeRouter() as a, FakeRouter() as b, Client(f"{a.address},{b.address}") as client:
        a.replies["Explain"] = unknown
        b.replies["Explain"] = pb.ExplainResponse(request_key="k")
        assert (await client.explain("k")).request_key == "k"
        b.replies["Explain"] = unknown
        with pytest.raises(LegatoError) as caught:
            await client.explain("k")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        assert len(a.unary_requests) == len(b.unary_requests) == 2


async def test_a_cancelled_unary_call_stays_a_cancellation() -> None:
    async with FakeRouter() as router, Client(router.address) as client:
        router.break_connections()
        task = asyncio.create_task(client.list_models())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_dns_target_works() -> None:
    async with FakeRouter(HELLO) as router, Client(f"dns:///{router.address}") as client:
        assert (await client.generate("x")).text == "Hello"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *ec, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    for name in ("server", "caller"):
        openssl("req", *ec, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (tmp_path / "names").write_text("subjectAltName=DNS:localhost")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)

    def pem(name: str) -> bytes:
        return (tmp_path / name).read_bytes()

    credentials = grpc.ssl_server_credentials(
        [(pem("server.key"), pem("server.pem"))], pem("ca.pem"), require_client_auth=True
    )
    async with FakeRouter(HELLO, credentials=credentials) as router:
        tls = Tls(pem("ca.pem"), pem("caller.pem"), pem("caller.key"))
        assert "PRIVATE" not in repr(tls)
        async with Client(router.address, tls=tls, token="secret") as client:
            assert (await client.generate("x")).text == "Hello"
        assert router.calls[0].metadata["authorization"] == "Bearer secret"
        for stranger in (Tls(pem("ca.pem")), None):
            async with Client(router.address, tls=stranger, max_resumes=0) as client:
                with pytest.raises(LegatoError) as caught:
                    await client.generate("x", timeout_s=5)
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(router.calls) == 1
