"""Relay with a scripted worker: every order of what client and worker do (B038, B064, B098)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2, worker_pb2 as pb

from tests.scripted_link import Reader, Router, ScriptedLink, scripted, settle
from tests.small_tokenizers import byte_level, ids_of

pytestmark = pytest.mark.timeout(30)


async def placed(router: Router, **fields: Any) -> tuple[Any, Reader, ScriptedLink, pb.Submit]:
    """A relay whose request has been sent to a worker, which has not answered."""
    relay = router.relay(**fields)
    reader = Reader(relay)
    await settle()
    [link] = [link for link in router.links if link.num_attempts]
    [submit] = [frame for frame in link.sent() if isinstance(frame, pb.Submit)]
    return relay, reader, link, submit


async def running(router: Router, **fields: Any) -> tuple[Any, Reader, ScriptedLink, int]:
    """A relay whose request a worker has accepted."""
    relay, reader, link, submit = await placed(router, **fields)
    link.accept(submit.rid)
    await settle()
    assert reader.kinds == ["admitted"]
    return relay, reader, link, submit.rid


async def test_an_answer_from_end_to_end() -> None:
    with scripted("w0") as router:
        _, reader, link, rid = await running(router, max_tokens=4)
        link.tokens(rid, 0, 10)
        link.tokens(rid, 1, 11, 12)
        await settle()
        link.tokens(rid, 3, 13)
        link.end(rid, 0)
        await reader.task
        assert reader.ids() == [10, 11, 12, 13]
        assert reader.text() == byte_level().decode([10, 11, 12, 13])
        assert reader.finished.reason == inference_pb2.FINISH_REASON_LENGTH
        assert reader.finished.usage.completion_tokens == 4


async def test_credit_granted_between_submit_and_accepted_is_passed_on() -> None:
    with scripted("w0") as router:
        relay, reader, link, submit = await placed(router, initial_credit=0, max_tokens=9)
        assert submit.initial_credit == 0
        relay.grant(3)
        relay.grant(2)
        assert link.sent() == []  # nobody to grant to yet
        link.accept(submit.rid)
        await settle()
        assert link.sent() == [pb.GrantCredit(rid=submit.rid, tokens=5)]
        link.tokens(submit.rid, 0, 1, 2, 3, 4, 5)
        await settle()
        relay.grant(1)
        assert link.sent() == [pb.GrantCredit(rid=submit.rid, tokens=1)]
        link.end(submit.rid, 0)
        await reader.task


async def test_credit_granted_before_the_submit_is_in_it() -> None:
    with scripted("w0") as router:
        relay = router.relay(initial_credit=1)
        relay.grant(4)
        reader = Reader(relay)
        await settle()
        [link] = router.links
        [submit] = link.sent()
        assert submit.initial_credit == 5
        link.accept(submit.rid)
        link.end(submit.rid, 0)
        await reader.task


async def test_a_client_that_does_not_take_holds_the_window_and_no_more() -> None:
    """Frames count as delivered when the next one is asked for."""
    with scripted("w0") as router:
        relay = router.relay(window=8)
        frames = relay.frames()
        first = asyncio.ensure_future(anext(frames))
        await settle()
        [link] = router.links
        [submit] = link.sent()
        assert submit.initial_credit == 8
        link.accept(submit.rid)
        assert (await first).HasField("admitted")
        link.tokens(submit.rid, 0, *range(1, 9))
        assert len((await anext(frames)).delta.ids) == 8
        await settle()
        assert link.sent() == []  # not taken yet
        waiting = asyncio.ensure_future(anext(frames))
        await settle()
        assert link.sent() == [pb.GrantCredit(rid=submit.rid, tokens=8)]
        link.end(submit.rid, 0)
        assert (await waiting).delta.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert (await anext(frames)).HasField("finished")
        await frames.aclose()


async def test_what_comes_behind_a_stop_string_costs_the_client_no_credit() -> None:
    """The worker spent 6 of 6 tokens; the client saw 3, so 3 more are due to the other choice."""
    quick = ids_of(byte_level(), *"qui")
    with scripted("w0") as router:
        stop = inference_pb2.Stop(strings=["qu"], ignore_eos=True)
        _, reader, link, rid = await running(
            router, n=2, initial_credit=6, stop=stop, max_tokens=20
        )
        link.tokens(rid, 0, 10, choice=1)
        await settle()
        link.tokens(rid, 0, *quick[:2])
        await settle()
        assert pb.CancelRequest(rid=rid, choice=0) in link.sent()
        link.tokens(rid, 2, *quick[2:], 12, 13)  # sent before it heard of that
        await settle()
        assert link.sent() == [pb.GrantCredit(rid=rid, tokens=3)]
        assert reader.ids(0) == quick[:2] and reader.ids(1) == [10]
        link.tokens(rid, 1, 11, 12, 13, choice=1)
        link.end(rid, 1)
        await reader.task
        assert reader.finished.usage.completion_tokens == 6


async def test_what_comes_behind_a_stop_string_in_the_same_message() -> None:
    """Five ids in one message, the second completes the stop string: three are paid back."""
    with scripted("w0") as router:
        stop = inference_pb2.Stop(strings=["qu"], ignore_eos=True)
        _, reader, link, rid = await running(
            router, n=2, initial_credit=5, stop=stop, max_tokens=20
        )
        link.tokens(rid, 0, *ids_of(byte_level(), *"qui"), 12, 13)
        await settle()
        sent = link.sent()
        assert pb.CancelRequest(rid=rid, choice=0) in sent
        assert pb.GrantCredit(rid=rid, tokens=3) in sent
        link.end(rid, 0, 1)
        await reader.task
        assert len(reader.ids(0)) == 2


@pytest.mark.parametrize("moment", ["before", "placing", "accepted", "answering"])
async def test_a_cancel_frame_at_every_moment(moment: str) -> None:
    with scripted("w0") as router:
        relay = router.relay()
        if moment == "before":
            relay.cancel()
        reader = Reader(relay)
        await settle()
        [link] = router.links
        submits = link.sent()
        if moment == "before":
            assert submits == []
            with pytest.raises(LegatoError) as caught:
                await reader.task
            assert caught.value.reason is Reason.CANCELLED
            return
        rid = submits[0].rid
        if moment == "placing":
            relay.cancel()
            with pytest.raises(LegatoError) as caught:
                await reader.task
            assert caught.value.reason is Reason.CANCELLED
            assert link.sent() == [pb.CancelRequest(rid=rid)]
            link.accept(rid)  # too late, and for nobody
            return
        link.accept(rid)
        if moment == "answering":
            await settle()
            link.tokens(rid, 0, 1, 2)
            await settle()
        relay.cancel()  # "accepted": the event is there, and the relay has not run since
        await settle()
        assert link.sent() == [pb.CancelRequest(rid=rid)]
        if moment == "accepted" and reader.task.done():
            with pytest.raises(LegatoError) as caught:
                await reader.task
            assert caught.value.reason is Reason.CANCELLED
            return
        link.end(rid, reason=inference_pb2.FINISH_REASON_CANCELLED)
        await reader.task
        assert reader.finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        assert reader.finished.usage.completion_tokens == len(reader.ids())


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancel_after_any_number_of_turns_of_the_loop(turns: int) -> None:
    """Between Submit and Accepted and just behind: whichever task runs first, the worker hears of
    it and the relay ends."""
    with scripted("w0") as router:
        relay = router.relay()
        reader = Reader(relay)
        await settle()
        [link] = router.links
        rid = link.sent()[0].rid
        link.accept(rid)
        for _ in range(turns):
            await asyncio.sleep(0)
        relay.cancel()
        await settle()
        assert link.sent() == [pb.CancelRequest(rid=rid)]
        link.end(rid, reason=inference_pb2.FINISH_REASON_CANCELLED)
        await asyncio.wait([reader.task], timeout=1)
        assert reader.task.done()
        reader.task.exception()


@pytest.mark.parametrize("turns", range(12))
async def test_a_client_that_leaves_after_any_number_of_turns(turns: int) -> None:
    """The call's task is cancelled: nothing stays behind, and the worker is told once."""
    with scripted("w0") as router:
        relay = router.relay()
        reader = Reader(relay)
        await settle()
        [link] = router.links
        rid = link.sent()[0].rid
        link.accept(rid)
        link.tokens(rid, 0, 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.task.cancel()
        await asyncio.gather(reader.task, return_exceptions=True)
        assert reader.task.cancelled()
        names = [event.name for event in relay._timeline.events]
        assert [name for name in names if name in ("finished", "refused")] == ["finished"]
        await settle()
        assert link.sent() == [pb.CancelRequest(rid=rid)]
        link.tokens(rid, 1, 2)  # what was on its way is for nobody
        link.end(rid, 0)


async def test_a_lost_worker_the_answer_goes_on_elsewhere() -> None:
    with scripted("w0", "w1") as router:
        _, reader, link, rid = await running(router, n=2, max_tokens=20, prompt_logprobs=1)
        link.tokens(rid, 0, 10, 11)
        link.tokens(rid, 0, 20, choice=1)
        await settle()
        link.sent()
        link.lose("gone")
        await settle()
        other = next(other for other in router.links if other is not link)
        [submit] = other.sent()
        assert submit.attempt == 1 and submit.initial_credit == 8
        assert [(c.choice, list(c.ids), c.finished) for c in submit.resume] == [
            (0, [10, 11], False),
            (1, [20], False),
        ]
        assert not submit.HasField("prompt_logprobs")  # they were sent, or are held here
        other.accept(submit.rid)
        other.tokens(submit.rid, 2, 12)
        other.tokens(submit.rid, 0, 20, 21, choice=1)  # the first was delivered before
        await settle()
        assert reader.kinds.count("moved") == 1
        moved = next(f.moved for f in reader.frames if f.HasField("moved"))
        assert (moved.from_index, moved.cause, moved.worker) == (3, "gone", other.name)
        other.end(submit.rid, 0, 1)
        await reader.task
        assert reader.ids(0) == [10, 11, 12] and reader.ids(1) == [20, 21]
        assert reader.finished.timings.moves == 1


async def test_prompt_log_probabilities_come_once_although_a_worker_died_half_way() -> None:
    entries = [inference_pb2.TokenLogprobs(logprob=-i) for i in range(1, 4)]

    def some(rid: int, *which: int) -> pb.Step:
        step = pb.Step()
        step.logprobs.add(rid=rid, prompt_tokens=[entries[i] for i in which])
        return step

    with scripted("w0", "w1") as router:
        _, reader, link, rid = await running(router, ids=[1, 2, 3, 4], prompt_logprobs=0)
        link.hear(step=some(rid, 0, 1))
        await settle()
        link.lose()
        await settle()
        other = next(other for other in router.links if other is not link)
        [submit] = other.sent()
        assert submit.HasField("prompt_logprobs") and not submit.resume
        other.accept(submit.rid)
        other.hear(step=some(submit.rid, 0, 1))
        other.hear(step=some(submit.rid, 2))
        other.tokens(submit.rid, 0, 9)
        other.end(submit.rid, 0)
        await reader.task
        first = next(f.delta for f in reader.frames if f.HasField("delta"))
        assert list(first.prompt_logprobs) == entries


async def test_a_worker_that_drained_hands_its_answers_on() -> None:
    with scripted("w0", "w1") as router:
        _, reader, link, rid = await running(router)
        link.tokens(rid, 0, 10)
        link.hear(draining=pb.Draining(deadline_s=1))
        link.end(rid, reason=4, error_reason="DRAINING", error_message="deadline")
        await settle()
        other = next(other for other in router.links if other is not link)
        [submit] = other.sent()
        other.accept(submit.rid)
        other.tokens(submit.rid, 1, 11)
        other.end(submit.rid, 0)
        await reader.task
        assert reader.ids() == [10, 11]


async def test_with_nobody_to_hand_on_to_the_cause_is_told() -> None:
    with scripted("w0") as router:
        _, reader, link, rid = await running(router)
        link.hear(draining=pb.Draining(deadline_s=1))
        link.end(rid, reason=4, error_reason="DRAINING", error_message="deadline")
        with pytest.raises(LegatoError) as caught:
            await reader.task
        assert caught.value.reason is Reason.DRAINING and caught.value.retry_after_s


async def test_those_that_had_no_room_may_take_a_moved_answer() -> None:
    """w0 refused at first; w1, which took it, is lost: w0 is asked again."""
    with scripted("w0", "w1") as router:
        _, reader, first, submit = await placed(router)
        first.nack(submit.rid, "KV_CAPACITY")
        await settle()
        second = next(link for link in router.links if link is not first)
        [again] = second.sent()
        second.accept(again.rid)
        await settle()
        second.lose()
        await settle()
        [moved] = first.sent()
        first.accept(moved.rid)
        first.end(moved.rid, 0)
        await reader.task
        assert reader.kinds == ["admitted", "moved", "delta", "finished"]


async def test_after_two_moves_a_third_loss_is_the_end() -> None:
    with scripted("w0", "w1", "w2", "w3") as router:
        _, reader, link, _ = await running(router)
        for _ in range(2):
            link.lose()
            await settle()
            [link] = [other for other in router.links if other.num_attempts]
            link.accept(link.sent()[0].rid)
            await settle()
        link.lose()
        with pytest.raises(LegatoError) as caught:
            await reader.task
        assert caught.value.reason is Reason.QUARANTINED


async def test_an_answer_that_was_whole_needs_no_other_worker() -> None:
    """Its choices had ended; the worker is lost, or fails, before it says so."""
    for how in ("lost", "failed", "drained"):
        with scripted("w0") as router:
            _, reader, link, rid = await running(router, n=2)
            step = pb.Step()
            for choice in (0, 1):
                step.ended_choices.add(rid=rid, choice=choice, reason=1)
            link.tokens(rid, 0, 1)
            link.hear(step=step)
            if how == "lost":
                link.lose()
            else:
                reason = "INTERNAL" if how == "failed" else "DRAINING"
                link.end(rid, reason=4, error_reason=reason, error_message="x")
            await reader.task
            assert reader.finished.reason == inference_pb2.FINISH_REASON_STOP


async def test_a_gap_is_an_error_and_the_worker_is_told_to_stop() -> None:
    with scripted("w0") as router:
        _, reader, link, rid = await running(router)
        link.tokens(rid, 0, 1)
        link.tokens(rid, 2, 3)
        with pytest.raises(LegatoError) as caught:
            await reader.task
        assert caught.value.reason is Reason.INTERNAL
        assert link.sent() == [pb.CancelRequest(rid=rid)]


async def test_reasons_of_a_worker_that_this_router_does_not_know() -> None:
    with scripted("w0") as router:
        _, reader, link, rid = await running(router)
        link.end(rid, reason=4, error_reason="NEW_IN_VERSION_9", error_message="hm")
        with pytest.raises(LegatoError) as caught:
            await reader.task
        assert caught.value.reason is Reason.INTERNAL and caught.value.message == "hm"


async def test_a_request_whose_time_is_up_is_not_placed() -> None:
    with scripted("w0") as router:
        times = iter([0.0, 0.0, 5.0])
        reader = Reader(router.relay(deadline_s=1.0, clock=lambda: next(times, 5.0)))
        with pytest.raises(LegatoError) as caught:
            await reader.task
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert router.links[0].sent() == []


async def test_a_cancel_or_a_deadline_while_it_moves_leaves_what_there_is() -> None:
    with scripted("w0", "w1", max_num_seqs=1) as router:
        relay, reader, link, rid = await running(router)
        link.tokens(rid, 0, 10)
        await settle()
        other = next(other for other in router.links if other is not link)
        other.hear(snapshot=pb.Snapshot(running=1, waiting=50))
        link.lose()
        await settle()
        assert len(router.room) == 1
        relay.cancel()
        await reader.task
        assert reader.finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        assert reader.ids() == [10]
