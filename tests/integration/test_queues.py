"""Queues from the outside: every bound refuses with its number and a time to come back, what is
refused for want of room waits for some, and nobody is passed over for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2 as pb

from tests.local_fleet import fleet, until

pytestmark = pytest.mark.timeout(60)

LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
ONE_SEAT = {"max_num_seqs": 1, "max_num_batched_tokens": 64}


async def test_the_routers_own_limit_of_requests(model_dir: Path) -> None:
    async with (
        fleet(model_dir, router={"max_requests": 3}) as running,
        running.client() as client,
    ):
        streams = [client.stream(token_ids=[i], **LONG) for i in range(1, 4)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        with pytest.raises(LegatoError) as caught:
            await client.generate(token_ids=[9], max_tokens=1)
        assert caught.value.reason is Reason.QUEUE_FULL and caught.value.retry_after_s
        assert caught.value.metadata["limit"] == "3"
        await streams[0].aclose()
        await until(lambda: running.routers[0].service.num_requests == 2)
        await client.generate(token_ids=[9], max_tokens=1)
        for stream in streams:
            await stream.aclose()
        await running.until_idle()


async def test_a_refusal_at_the_door_reaches_a_client_that_is_busy(model_dir: Path) -> None:
    """The router refuses before it looks at the request. A client whose loop lags writes it into a
    call that has ended already, and would be told INTERNAL for its pains."""
    async with fleet(model_dir, router={"max_requests": 1}) as running:
        async with running.client() as client, running.stub() as stub:
            first = client.stream(token_ids=[1], **LONG)
            await anext(first)
            asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), max_tokens=1)
            for lag_s in (0.0, 0.005, 0.02, 0.1):
                call = stub.Generate()
                await asyncio.sleep(lag_s)
                try:
                    await call.write(pb.ClientFrame(request=asked))
                    await call.done_writing()
                    await call.read()
                except grpc.aio.AioRpcError:
                    pass
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, lag_s
            await first.aclose()
        await running.until_idle()


async def test_the_queue_is_bounded_in_prompt_tokens_too(model_dir: Path) -> None:
    router = {"max_queued_tokens": 1000}
    async with (
        fleet(model_dir, worker=ONE_SEAT, router=router) as running,
        running.client() as client,
    ):
        streams = [client.stream(token_ids=[i], **LONG) for i in range(1, 10)]
        for stream in streams:
            stream._start()
        await until(lambda: all(stream.admitted for stream in streams))
        room = running.routers[0].service._dispatcher._room
        waiting = [client.stream(token_ids=[7] * 600, **LONG)]
        waiting[0]._start()
        await until(lambda: room.num_tokens == 600)
        with pytest.raises(LegatoError) as caught:
            await client.generate(token_ids=[7] * 600, max_tokens=1)
        assert caught.value.reason is Reason.QUEUE_FULL
        assert caught.value.metadata == {"limit": "1000", "observed": "1200"}
        for stream in [*streams, *waiting]:
            await stream.aclose()
        await running.until_idle()


async def test_two_routers_before_a_worker_that_is_full(model_dir: Path) -> None:
    """The worker has fewer places than each router thinks: it refuses with QUEUE_FULL, those wait
    in their routers, and all are served."""
    worker = ONE_SEAT | {"max_waiting": 2, "simulated_base_ms": 0.5}
    async with fleet(model_dir, num_routers=2, worker=worker) as running:
        async with running.client(max_resumes=0) as client:
            answers = await asyncio.gather(
                *(client.generate(token_ids=[i], max_tokens=20) for i in range(1, 41))
            )
        assert len(answers) == 40
        assert {answer.timings.moves for answer in answers} == {0}
        await running.until_idle()


async def test_more_urgent_ones_come_first_and_none_is_forgotten(model_dir: Path) -> None:
    async with (
        fleet(model_dir, worker=ONE_SEAT | {"max_waiting": 0}) as running,
        running.client() as client,
    ):
        first = client.stream(token_ids=[1], **LONG)
        await anext(first)
        room = running.routers[0].service._dispatcher._room
        order: list[str] = []

        async def ask(name: str, request_class: Any) -> None:
            await client.generate(token_ids=[5], max_tokens=2, request_class=request_class)
            order.append(name)

        tasks = []
        for name, request_class in (
            ("batch", "batch"),
            ("standard 1", "standard"),
            ("standard 2", None),
            ("urgent", "interactive"),
        ):
            tasks.append(asyncio.create_task(ask(name, request_class)))
            await until(lambda: len(room) == len(tasks))
        await first.aclose()
        await asyncio.gather(*tasks)
        assert order == ["urgent", "standard 1", "standard 2", "batch"]
        await running.until_idle()


async def test_plan_says_what_would_happen(model_dir: Path) -> None:
    """Without running anything: workers with room, best first, or why not."""
    async with (
        fleet(model_dir, num_workers=2, worker=ONE_SEAT | {"num_blocks": 64}) as running,
        running.client() as client,
    ):
        plan = await client.plan(token_ids=[1] * 20, max_tokens=20)
        assert plan.admissible and (plan.prompt_tokens, plan.blocks_needed) == (20, 3)
        assert {worker.worker for worker in plan.workers} == {"w0", "w1"}
        assert plan.workers[0].score_s <= plan.workers[1].score_s
        never = await client.plan(token_ids=[1] * 2000, max_tokens=20)
        assert not never.admissible and never.reason == Reason.NEVER_FITS
        wrong = await client.plan(token_ids=[1], max_tokens=0)
        assert not wrong.admissible and wrong.reason == Reason.INVALID_ARGUMENT
        assert running.num_steps() == 0 and not running.held()


@pytest.mark.parametrize("kind", ["choices", "log probabilities", "sampled", "a stop id"])
async def test_unary_equals_stream(model_dir: Path, kind: str) -> None:
    """B061, B062 beyond lengths: the same on both paths, down to every log probability."""
    asked = pb.GenerateRequest(text="one two", max_tokens=40)
    match kind:
        case "choices":
            asked.n = 4
            asked.sampling.temperature = 1.0
            asked.stop.strings.append("er")
        case "log probabilities":
            asked.logprobs = 3
            asked.prompt_logprobs = 2
        case "sampled":
            asked.sampling.temperature = 0.8
            asked.sampling.top_p = 0.9
        case "a stop id":
            asked.stop.token_ids.extend(range(1, 60))
            asked.stop.min_tokens = 3
    asked.sampling.seed = 77
    async with fleet(model_dir) as running, running.stub() as stub:
        unary = await stub.GenerateOnce(asked)
        choices: dict[int, pb.Choice] = {}
        finished = pb.Finished()
        async for frame in stub.Generate(iter([pb.ClientFrame(request=asked)])):
            if frame.HasField("delta"):
                delta = frame.delta
                choice = choices.setdefault(delta.choice, pb.Choice(choice=delta.choice))
                assert delta.start_index == len(choice.ids)
                choice.ids.extend(delta.ids)
                choice.text += delta.text
                choice.logprobs.extend(delta.logprobs)
                choice.prompt_logprobs.extend(delta.prompt_logprobs)
                assert not choice.finish_reason, "a delta behind the last one"
                if delta.finish_reason:
                    choice.finish_reason = delta.finish_reason
                    choice.stop_string = delta.stop_string
            elif frame.HasField("finished"):
                finished = frame.finished
        assert [choices[number] for number in sorted(choices)] == list(unary.choices)
        assert finished.reason == unary.finished.reason
        for field in ("prompt_tokens", "completion_tokens"):
            assert getattr(finished.usage, field) == getattr(unary.finished.usage, field)
        assert finished.usage.completion_tokens == sum(len(c.ids) for c in unary.choices)
