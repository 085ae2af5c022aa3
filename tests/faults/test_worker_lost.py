"""A worker goes away under its answers: they go on from another one, with no gap and no duplicate,
and are what they would have been. Nothing is lost, or a typed error says what is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.answer import assemble
from legato.client import Answer, Client, Delta
from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2 as pb

from tests.local_fleet import fleet, until

pytestmark = pytest.mark.timeout(60)

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "two choices": {"n": 2, **SAMPLED},
    "log probabilities": {"logprobs": 3},
    "prompt log probabilities": {"prompt_logprobs": 2, "token_ids": list(range(1, 60))},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, **SAMPLED},
    "stop string late": {"stop": ["thequ", "zzz"], "n": 3, **SAMPLED},
    "ids only": {"skip_text": True},
    "text prompt": {"token_ids": None, "prompt": "The quick brown fox"},
    "min tokens": {"min_tokens": 50, "ignore_eos": False},
    "whole pool": {"max_tokens": 200, "token_ids": [3] * 500},
}


def fields_of(kind: str) -> dict[str, Any]:
    return {"token_ids": [7, 8, 9], "max_tokens": 120, "ignore_eos": True} | KINDS[kind]


async def answer_while(
    client: Client, fields: dict[str, Any], after: Sequence[tuple[int, Any]]
) -> Answer:
    """The answer to a request, with something done once so many ids have come."""
    todo = list(after)
    deltas: list[Delta] = []
    count = 0
    async with client.stream(**fields) as stream:
        async for delta in stream:
            deltas.append(delta)
            count += len(delta.ids)
            while todo and count >= todo[0][0]:
                todo.pop(0)[1](stream)
        assert not todo, "the answer ended before all was done"
        assert stream.admitted is not None and stream.finished is not None
        return assemble(
            deltas, n=fields.get("n", 1), admitted=stream.admitted, finished=stream.finished
        )


def number_of(worker: str) -> int:
    return int(worker.removeprefix("w"))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_goes_on_as_if_nothing_had_happened(model_dir: Path, kind: str) -> None:
    fields = fields_of(kind)
    async with fleet(model_dir, num_workers=2) as running, running.client(max_resumes=0) as client:
        alone = await client.generate(**fields)

        def lose(stream: Any) -> None:
            running.lose(number_of(stream.admitted.worker))

        answer = await answer_while(client, fields, [(1 + fields["max_tokens"] // 3, lose)])
        assert answer.choices == alone.choices
        assert answer.finish_reason == alone.finish_reason
        assert answer.usage.completion_tokens == alone.usage.completion_tokens
        assert answer.timings.moves == 1
        await running.until_idle()


async def test_a_move_is_told_in_the_stream(model_dir: Path) -> None:
    async with fleet(model_dir, num_workers=2) as running, running.stub() as stub:
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5]), max_tokens=100, stop=pb.Stop(ignore_eos=True)
        )
        call = stub.Generate(iter([pb.ClientFrame(request=asked)]))
        kinds: list[str] = []
        count, moved, first, key = 0, pb.Moved(), "", ""
        async for frame in call:
            kind = frame.WhichOneof("frame")
            assert kind is not None
            if kind != "delta" or kinds[-1:] != ["delta"]:
                kinds.append(kind)
            if kind == "admitted":
                first, key = frame.admitted.worker, frame.admitted.request_key
            if kind == "moved":
                moved = frame.moved
                assert moved.from_index == count
            if kind == "delta":
                assert frame.delta.start_index == count
                count += len(frame.delta.ids)
                if count >= 40 and "moved" not in kinds:
                    running.lose(number_of(first))
        assert kinds == ["admitted", "delta", "moved", "delta", "finished"]
        assert moved.cause and {first, moved.worker} == {"w0", "w1"} and count == 100
        timeline = await stub.Explain(pb.ExplainRequest(request_key=key))
        assert [event.name for event in timeline.events if event.name == "moved"] == ["moved"]


async def test_lost_before_the_first_token(model_dir: Path) -> None:
    """A worker that dies with a long prompt half computed, prompt log probabilities half sent: the
    other computes and sends all of it, once."""
    worker = {"max_prefill_chunk": 64, "simulated_base_ms": 4.0}
    fields: dict[str, Any] = {
        "token_ids": [1 + i % 300 for i in range(2000)],
        "max_tokens": 5,
        "prompt_logprobs": 1,
    }
    async with (
        fleet(model_dir, num_workers=2, worker=worker) as running,
        running.client() as client,
    ):
        alone = await client.generate(**fields, cache_salt="alone")
        assert len(alone.choices[0].prompt_logprobs) == 1999
        task = asyncio.create_task(client.generate(**fields))
        schedulers = [w.engine._scheduler for w in running.workers]

        def half_way() -> list[int]:
            return [
                number
                for number, scheduler in enumerate(schedulers)
                if any(s.num_computed > 900 for s in list(scheduler.table.running))
            ]

        await until(lambda: bool(half_way()))
        running.lose(half_way()[0])
        answer = await task
        assert answer.choices == alone.choices
        assert answer.timings.moves == 1


async def test_many_answers_move_together(model_dir: Path) -> None:
    """Thirty streams on three workers, of which two die one after the other; one that had to move
    twice is whole as well."""
    worker = {"simulated_base_ms": 3.0}
    async with fleet(model_dir, num_workers=3, worker=worker) as running:
        async with running.client(max_resumes=0) as client:
            requests = [
                {"token_ids": [i], "max_tokens": 150, "ignore_eos": True, **SAMPLED}
                for i in range(1, 31)
            ]
            alone = await asyncio.gather(*(client.generate(**r) for r in requests))
            tasks = [asyncio.create_task(client.generate(**r)) for r in requests]
            for number in (0, 1):
                await asyncio.sleep(0.15)
                running.lose(number)
            answers = await asyncio.gather(*tasks)
            assert [a.choices for a in answers] == [a.choices for a in alone]
            assert max(a.timings.moves for a in answers) == 2
            assert {a.admitted.worker for a in answers} == {"w0", "w1", "w2"}
        await running.until_idle()


async def test_without_another_worker_the_error_says_so(model_dir: Path) -> None:
    async with fleet(model_dir) as running, running.client(max_resumes=0) as client:
        async with client.stream(token_ids=[1], max_tokens=2000, ignore_eos=True) as stream:
            await anext(stream)
            running.lose(0)
            with pytest.raises(LegatoError) as caught:
                async for _ in stream:
                    pass
        assert caught.value.reason is Reason.WORKER_LOST
        assert caught.value.code is grpc.StatusCode.ABORTED
        assert caught.value.retry_after_s is not None
        with pytest.raises(LegatoError) as refused:
            await client.generate(token_ids=[1], max_tokens=2)
        assert refused.value.reason is Reason.NO_WORKER
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        await until(lambda: not running.held())


async def test_a_worker_that_comes_back_is_used_again(model_dir: Path) -> None:
    """B074: what it held before is forgotten on both sides, and nothing is counted twice."""
    async with fleet(model_dir) as running, running.client(max_resumes=0) as client:
        fields: dict[str, Any] = {"token_ids": [1], "max_tokens": 50, "ignore_eos": True}
        alone = await client.generate(**fields)
        for _ in range(5):
            streams = [client.stream(**fields | {"max_tokens": 3000}) for _ in range(10)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            running.lose(0)
            for stream in streams:
                with pytest.raises(LegatoError):
                    async for _ in stream:
                        pass
            await until(lambda: not running.held())
            await running.wires[0].open()
            await until(lambda: running.links()[0].view is not None)
            view = running.links()[0].view
            assert view is not None and not view.unapplied
            assert (await client.generate(**fields)).ids == alone.ids
        await running.until_idle()


async def test_the_client_goes_on_when_the_only_worker_flaps(model_dir: Path) -> None:
    """No other worker, but a client with resumes to spend: the answer is whole in the end."""
    async with fleet(model_dir) as running, running.client() as client:
        fields = fields_of("two choices")
        alone = await client.generate(**fields)
        answer = await answer_while(client, fields, [(50, lambda _: running.wires[0].cut())])
        assert answer.choices == alone.choices
        await running.until_idle()


async def test_three_lost_workers_end_a_request(model_dir: Path) -> None:
    """A request that was running on workers that died is not passed on for ever."""
    async with fleet(model_dir, num_workers=4) as running:
        async with running.client(max_resumes=0) as client:
            stream = client.stream(token_ids=[1], max_tokens=4000, ignore_eos=True)
            lost: list[int] = []
            with pytest.raises(LegatoError) as caught:
                async for _ in stream:
                    for number, worker in enumerate(running.workers):
                        scheduler = worker.engine._scheduler
                        if scheduler.table.requests and number not in lost and len(lost) < 3:
                            running.lose(number)
                            lost.append(number)
                            break
            assert caught.value.reason is Reason.QUARANTINED
            assert caught.value.retry_after_s is None and len(lost) == 3
            assert (await client.generate(token_ids=[2], max_tokens=3)).ids  # the fourth lives
        await until(lambda: not running.held())


async def test_a_cancel_while_the_answer_moves(model_dir: Path) -> None:
    """Its worker is gone and the other has no room yet: the Cancel frame is answered by Finished,
    as in any other state, and what was delivered stands."""
    worker = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    async with fleet(model_dir, num_workers=2, worker=worker) as running:
        async with running.client(max_resumes=0) as client:
            long = {"max_tokens": 4000, "ignore_eos": True}
            others = [client.stream(token_ids=[i], **long) for i in range(1, 18)]  # type: ignore[arg-type]
            victim = others[0]
            await anext(victim)
            assert victim.admitted is not None
            for stream in others:
                stream._start()
            room = running.routers[0].service._dispatcher._room
            await until(lambda: all(s.admitted is not None for s in others))
            # Nine on each at most: the one that moves has to wait.
            running.lose(number_of(victim.admitted.worker))
            await until(lambda: len(room) > 0)
            await victim.cancel()
            async for _ in victim:
                pass
            assert victim.finished is not None
            assert victim.finished.reason == pb.FINISH_REASON_CANCELLED
            assert victim.finished.usage.completion_tokens > 0
            for stream in others:
                await stream.aclose()
        await until(lambda: not running.held())


async def test_a_dead_affine_worker_costs_no_call(model_dir: Path) -> None:
    """B076, B085: the prefix points at a worker that has died; twenty calls, no failure."""
    async with fleet(model_dir, num_workers=3) as running, running.client(max_resumes=0) as client:
        fields: dict[str, Any] = {"token_ids": [9] * 64, "max_tokens": 4, "session": "s"}
        home = (await client.generate(**fields)).admitted.worker
        assert {(await client.generate(**fields)).admitted.worker for _ in range(5)} == {home}
        running.lose(number_of(home))
        workers = {(await client.generate(**fields)).admitted.worker for _ in range(20)}
        assert home not in workers and len(workers) == 1
        await running.wires[number_of(home)].open()
        await until(lambda: all(link.view for link in running.links()))
        assert (await client.generate(**fields)).admitted.worker == home
