"""Dispatcher on scripted links: what a Nack leads to, and who is never asked (B085)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from legato.errors import LegatoError, Reason
from legato.v1 import worker_pb2 as pb
from legato_router.dispatcher import MAX_BACKLOG, Placement

from tests.scripted_link import Router, scripted, settle

pytestmark = pytest.mark.timeout(30)


def dispatch(
    router: Router, tried: set[str] | None = None, timeout_s: float | None = None, **fields: Any
) -> asyncio.Task[Placement]:
    return asyncio.create_task(
        router.dispatcher.dispatch(
            router.model,
            router.prepare(**fields),
            pb.Submit,
            affinity=b"a",
            timeout_s=timeout_s,
            tried=set() if tried is None else tried,
        )
    )


async def submitted(router: Router) -> Any:
    await settle()
    [link] = [link for link in router.links if link.num_attempts]
    return link, link.sent()[-1].rid


async def test_each_refusal_goes_to_a_worker_that_was_not_asked() -> None:
    with scripted("w0", "w1", "w2", "w3") as router:
        task = dispatch(router)
        asked = []
        for _ in range(3):
            link, rid = await submitted(router)
            asked.append(link.name)
            link.nack(rid, "KV_CAPACITY", retry_after_s=0.7)
        with pytest.raises(LegatoError) as caught:
            await task
        assert len(set(asked)) == 3  # two re-picks, then the refusal itself
        assert caught.value.reason is Reason.KV_CAPACITY and caught.value.retry_after_s == 0.7


async def test_what_is_wrong_with_the_request_is_not_asked_again() -> None:
    for reason in ("INVALID_ARGUMENT", "NEVER_FITS"):
        with scripted("w0", "w1") as router:
            task = dispatch(router)
            link, rid = await submitted(router)
            link.nack(rid, reason, field="n")
            with pytest.raises(LegatoError) as caught:
                await task
            assert (caught.value.reason, caught.value.field) == (reason, "n")


async def test_a_worker_that_dies_before_it_answers_is_passed_over() -> None:
    with scripted("w0", "w1") as router:
        tried: set[str] = set()
        task = dispatch(router, tried)
        link, _ = await submitted(router)
        link.lose()
        link.attach()  # it is back at once, and is not trusted with this one
        other, rid = await submitted(router)
        assert other is not link and tried == {link.name}
        other.accept(rid)
        assert (await task).attempt.worker == other.name
        other.end(rid)


async def test_a_full_worker_is_asked_again_only_when_it_has_sent_numbers() -> None:
    """QUEUE_FULL and no other worker: the request waits here, in its place in the order."""
    with scripted("w0") as router:
        [link] = router.links
        first = dispatch(router)
        _, rid = await submitted(router)
        link.nack(rid, "QUEUE_FULL", snapshot=pb.Snapshot(running=8))
        await settle()
        assert len(router.room) == 1 and not link.num_attempts
        second = dispatch(router)
        await settle()
        assert len(router.room) == 2
        for _ in range(5):  # refused again and again: it does not lose its place
            link.hear(snapshot=pb.Snapshot(running=8, waiting=MAX_BACKLOG - 1))
            await settle()
            [submit] = link.sent()
            link.nack(submit.rid, "QUEUE_FULL", snapshot=pb.Snapshot(running=8))
            await settle()
            assert len(router.room) == 2
        link.hear(snapshot=pb.Snapshot(running=8, waiting=MAX_BACKLOG - 1))
        await settle()
        [submit] = link.sent()
        link.accept(submit.rid)
        await settle()
        assert first.done() and not second.done()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        link.end(submit.rid)


async def test_a_full_worker_and_an_empty_one() -> None:
    with scripted("w0", "w1") as router:
        task = dispatch(router)
        link, rid = await submitted(router)
        link.nack(rid, "QUEUE_FULL", snapshot=pb.Snapshot(running=8))
        other, again = await submitted(router)
        assert other is not link
        other.accept(again)
        await task
        other.end(again)


async def test_who_cannot_hold_it_is_no_reason_to_wait() -> None:
    """The one worker that could ever take it is gone: NO_WORKER, not a wait for the small one."""
    with scripted("small", "big") as router:
        small, big = router.links
        small.attach(num_blocks=4)
        big.lose()
        task = dispatch(router, ids=[1] * 200)
        with pytest.raises(LegatoError) as caught:
            await task
        assert caught.value.reason is Reason.NO_WORKER
        big.attach()
        task = dispatch(router, ids=[1] * 200)
        link, rid = await submitted(router)
        assert link is big
        big.accept(rid)
        await task
        big.end(rid)


async def test_draining_workers_and_other_models_are_not_asked() -> None:
    with scripted("w0", "w1", "w2") as router:
        router.links[0].hear(draining=pb.Draining(deadline_s=1))
        router.links[1].attach(fingerprint="other weights")
        for _ in range(3):
            task = dispatch(router)
            link, rid = await submitted(router)
            assert link is router.links[2]
            link.accept(rid)
            await task
            link.end(rid)
        router.links[2].hear(snapshot=pb.Snapshot(draining=True))
        with pytest.raises(LegatoError) as caught:
            await dispatch(router)
        assert caught.value.reason is Reason.NO_WORKER and caught.value.retry_after_s


async def test_the_wait_ends_at_the_deadline_or_the_routers_own_limit() -> None:
    for limit_s, timeout_s in ((0.05, None), (5.0, 0.05), (5.0, 0.0), (5.0, -1.0)):
        with scripted("w0", max_queue_s=limit_s) as router:
            router.links[0].hear(snapshot=pb.Snapshot(running=8, waiting=50))
            started = asyncio.get_running_loop().time()
            with pytest.raises(LegatoError) as caught:
                await dispatch(router, timeout_s=timeout_s)
            assert caught.value.reason is Reason.QUEUE_TIMEOUT
            assert asyncio.get_running_loop().time() - started < 1


async def test_a_caller_that_leaves_before_the_answer_cancels_at_the_worker() -> None:
    with scripted("w0") as router:
        task = dispatch(router)
        link, rid = await submitted(router)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert link.sent() == [pb.CancelRequest(rid=rid)]
        link.accept(rid)
        link.end(rid)


async def test_a_burst_on_old_numbers_spreads() -> None:
    """B080, B079: no snapshot comes in between; own picks count at once. Equal prompts too, on
    workers so fast that their scores hardly differ."""
    for prompts in ([[9, 9, 9]] * 64, [[n, 2, 3] for n in range(1, 65)]):
        with scripted(*[f"w{i}" for i in range(8)]) as router:
            for link in router.links:
                link.hear(snapshot=pb.Snapshot(prefill_tokens_per_s=1e6, decode_step_s=0.001))
            tasks = [dispatch(router, ids=ids) for ids in prompts]
            await settle()
            counts = [link.num_attempts for link in router.links]
            assert sum(counts) == 64 and max(counts) - min(counts) <= 2, counts
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
