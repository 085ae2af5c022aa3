"""Engine: what it publishes and when, liveness, and its end. The real scheduler and the simulated
runner; time is the test's."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from legato.block_hash import block_hash
from legato_worker.core.block_pool import BlockPool
from legato_worker.core.config import SchedulerConfig
from legato_worker.core.kv_cache import KVCacheManager
from legato_worker.core.output import EndCause
from legato_worker.core.request import FinishReason, Request
from legato_worker.core.scheduler import Scheduler
from legato_worker.engine import Add, Cancel, EndAll, Engine, EngineUpdate, Grant
from legato_worker.runners.simulated import (
    Fault,
    FaultKind,
    SimulatedConfig,
    SimulatedRunner,
    StepTimeModel,
)

pytestmark = pytest.mark.timeout(30)

VOCAB_SIZE = 1000


class World:
    """An engine and what it has said."""

    def __init__(
        self,
        *,
        depth: int = 0,
        step_s: float = 0.001,
        faults: tuple[Fault, ...] = (),
        **limits: Any,
    ) -> None:
        runner = SimulatedRunner(
            SimulatedConfig(
                vocab_size=VOCAB_SIZE,
                num_blocks=64,
                max_num_seqs=4,
                step_time=StepTimeModel(base_s=step_s),
                faults=faults,
                verify=True,
            ),
            time.sleep,
        )
        config: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_prefill_chunk": 64,
            "max_model_len": 8192,
            "vocab_size": VOCAB_SIZE,
        }
        self.scheduler = Scheduler(
            SchedulerConfig(**(config | limits)), KVCacheManager(BlockPool(64), 16, block_hash)
        )
        self.updates: list[tuple[float, EngineUpdate]] = []
        self.failure: BaseException | None = None
        self.engine = Engine(
            self.scheduler,
            runner,
            depth=depth,
            clock=time.monotonic,
            publish=lambda update: self.updates.append((time.monotonic(), update)),
            failed=self._failed,
        )

    def _failed(self, error: BaseException) -> None:
        self.failure = error

    def __enter__(self) -> World:
        self.engine.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.engine.stop(5.0)

    def add(self, key: int, **fields: Any) -> None:
        values: dict[str, Any] = {"prompt_ids": (key,), "max_tokens": 5}
        self.engine.send(Add(Request(key=key, arrival_s=time.monotonic(), **(values | fields))))

    def ended(self) -> dict[int, Any]:
        ends = [end for _, update in self.updates for end in update.output.ended]
        assert len({end.key for end in ends}) == len(ends), "a request ended twice"
        return {end.key: end for end in ends}

    def ids(self, key: int) -> list[int]:
        return [
            token_id
            for _, update in self.updates
            for k, token_id in zip(update.output.keys, update.output.ids, strict=True)
            if k == key
        ]


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_in_answers_out(depth: int) -> None:
    with World(depth=depth) as world:
        for key in range(1, 9):
            world.add(key, max_tokens=key)
        until(lambda: len(world.ended()) == 8)
        assert [len(world.ids(key)) for key in range(1, 9)] == list(range(1, 9))
        assert {end.reason for end in world.ended().values()} == {FinishReason.LENGTH}
        until(lambda: not world.scheduler.has_work)
        world.scheduler.check()


def test_depth_changes_no_answer() -> None:
    answers = []
    for depth in (0, 1):
        with World(depth=depth) as world:
            for key in (1, 2, 3):
                world.add(key, max_tokens=40)
            until(lambda: len(world.ended()) == 3)
            answers.append([world.ids(key) for key in (1, 2, 3)])
    assert answers[0] == answers[1]


def test_counters_come_often_while_busy_and_at_once_when_idle_again() -> None:
    """Each 100 ms while busy, also right after a long idle time; and B082: after a mass cancel the
    next numbers say so, without waiting for anything else to happen."""
    with World(step_s=0.002) as world:
        until(lambda: bool(world.updates))
        time.sleep(0.3)  # idle: the next numbers are due in 0.7 s
        started = time.monotonic()
        for key in range(1, 5):
            world.add(key, max_tokens=4000)
        until(lambda: any(u.counters and u.counters.running == 4 for _, u in world.updates))
        assert time.monotonic() - started < 0.25
        time.sleep(0.5)
        busy = [at for at, update in world.updates if update.counters and at > started + 0.1]
        gaps = [b - a for a, b in itertools.pairwise(busy)]
        assert len(busy) >= 3 and max(gaps) < 0.2
        for key in range(1, 5):
            world.engine.send(Cancel(key))
        cancelled = time.monotonic()
        until(lambda: len(world.ended()) == 4)
        until(lambda: world.updates[-1][1].counters is not None)
        last = world.updates[-1][1].counters
        assert last is not None and (last.running, last.used_blocks) == (0, 0)
        assert time.monotonic() - cancelled < 0.2


def test_last_key_tells_which_requests_the_numbers_include() -> None:
    with World() as world:
        for key in (1, 2, 3):
            world.add(key, max_tokens=2)
            until(lambda key=key: key in world.ended())  # type: ignore[misc]
            _, update = next(item for item in world.updates if item[1].output.ended)
            world.updates.clear()
            assert update.last_key == key


def test_a_cancel_is_in_the_next_step() -> None:
    with World(step_s=0.03) as world:
        world.add(1, max_tokens=4000)
        until(lambda: len(world.ids(1)) >= 2)
        step = world.scheduler.step
        world.engine.send(Cancel(1))
        until(lambda: 1 in world.ended())
        assert world.scheduler.step <= step + 1
        assert world.ended()[1].reason is FinishReason.CANCELLED


def test_stalled_is_a_step_that_hangs_and_nothing_else() -> None:
    """B094, B095: idle, busy and waiting for a reader are well; a frozen step is not."""
    stall = Fault(FaultKind.STALL, token_id=500, stall_s=0.6)
    with World(faults=(stall,), step_s=0.002) as world:
        engine = world.engine
        time.sleep(0.2)
        assert engine.stalled_for_s() == 0.0
        world.add(1, max_tokens=4000)
        for _ in range(20):
            time.sleep(0.01)
            assert engine.stalled_for_s() < 0.1
        engine.send(Cancel(1))
        world.add(2, credit=0)
        until(lambda: engine.busy and bool(world.scheduler.table.requests))
        for _ in range(20):
            time.sleep(0.01)
            assert engine.stalled_for_s() < 0.1
        engine.send(Grant(2, 100))
        until(lambda: 2 in world.ended())
        world.add(3, prompt_ids=(500,), max_tokens=2)
        until(lambda: engine.stalled_for_s() > 0.4)
        until(lambda: 3 in world.ended())
        until(lambda: engine.stalled_for_s() == 0.0)


def test_end_all_ends_all() -> None:
    with World() as world:
        for key in range(1, 9):
            world.add(key, max_tokens=4000)
        until(lambda: len(world.ids(1)) > 1)
        world.engine.send(EndAll(EndCause.DRAINING, "enough"))
        until(lambda: len(world.ended()) == 8)
        assert {end.cause for end in world.ended().values()} == {EndCause.DRAINING}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_dead_device_ends_every_request_once_with_its_cause(depth: int) -> None:
    """B091: those that run, those that wait, and those still in the mailbox."""
    with World(depth=depth, faults=(Fault(FaultKind.FATAL, token_id=700),)) as world:
        for key in range(1, 9):
            world.add(key, max_tokens=4000)
        until(lambda: len(world.ids(1)) > 3)
        world.add(9, prompt_ids=(700,))
        for key in range(1, 9):
            if key != 1:
                world.engine.send(Cancel(key))
        world.add(10)
        until(lambda: world.failure is not None)
        ended = world.ended()
        assert set(ended) == set(range(1, 11))
        assert ended[9].cause is EndCause.INTERNAL and "device is gone" in ended[9].message
        assert str(world.failure) == "scripted fault: the device is gone"
        assert world.engine.stalled_for_s() == 0.0


def test_a_request_that_breaks_the_scheduler_is_told_to_whoever_supervises() -> None:
    """A key used twice is a bug above: the engine does not go on with books that are wrong."""
    with World() as world:
        world.add(1, max_tokens=4000)
        world.add(1)
        until(lambda: world.failure is not None)
        assert isinstance(world.failure, ValueError)
        assert world.ended()[1].cause is EndCause.INTERNAL


def test_stop_ends_the_thread_after_its_step() -> None:
    world = World(step_s=0.05)
    with world:
        world.add(1, max_tokens=4000)
        until(lambda: len(world.ids(1)) > 0)
        assert world.engine.stop(2.0)
        names = [thread.name for thread in threading.enumerate()]
        assert "legato-engine" not in names


def test_only_depths_that_exist() -> None:
    with pytest.raises(ValueError, match="depth"):
        World(depth=2)
