"""The loop: mailbox -> schedule -> execute -> commit -> publish. Only owner of core state."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .core.batch import ScheduledBatch
from .core.output import Counters, EndCause, StepOutput
from .core.request import Request
from .core.scheduler import Scheduler
from .isolation import run_row_by_row
from .runners.base import FatalRunnerError, Runner
from .step_stats import StepStats

BUSY_COUNTERS_S = 0.1
IDLE_COUNTERS_S = 1.0


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    key: int
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    key: int
    tokens: int


@dataclass(frozen=True, slots=True)
class EndAll:
    cause: EndCause
    message: str


Command = Add | Cancel | Grant | EndAll


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """One hand-over from the engine to its surroundings, after a step or while idle.

    ``counters`` include every request up to ``last_key``.
    """

    output: StepOutput
    counters: Counters | None
    last_key: int
    kv_events: list[tuple[bool, bytes]]


class Engine:
    """Runs the scheduler and the runner in a thread of its own.

    ``send`` may be called from any thread and never blocks. ``publish`` is called from the engine
    thread, at most once per step; ``failed`` once, when the engine cannot go on, after every open
    request has been ended with INTERNAL. ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        depth: int,
        clock: Callable[[], float],
        publish: Callable[[EngineUpdate], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        if depth not in (0, 1):
            raise ValueError(f"depth must be 0 or 1, not {depth}")
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._publish = publish
        self._failed = failed
        self._mailbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._launched: deque[tuple[ScheduledBatch, float]] = deque()
        self._counters_s = float("-inf")
        self._last_key = 0
        self._thread = threading.Thread(target=self._main, name="legato-engine", daemon=True)
        self.stats = StepStats()
        self.progress_s = clock()
        self.busy = False
        self.num_isolated_steps = 0

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        self._mailbox.append(command)
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop after the current step; False when it did not end in time."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stalled_for_s(self) -> float:
        """Seconds without progress while there is work; 0 when idle. The base of liveness."""
        return self._clock() - self.progress_s if self.busy else 0.0

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._give_up(error)

    def _turn(self) -> None:
        scheduler = self._scheduler
        self._wake.clear()
        while self._mailbox:
            self._apply(self._mailbox.popleft())
        self.busy = scheduler.has_work
        batch = scheduler.schedule(self._clock())
        if batch is not None:
            self._launch(batch)
        committed = len(self._launched) > (self._depth if batch is not None else 0)
        if committed:
            self._commit_oldest()
        now = self._clock()
        if batch is not None or committed or not scheduler.has_work or self._waits_for_readers():
            self.progress_s = now
        self._hand_over(now)
        if batch is None and not self._launched and not self._mailbox:
            # Rows may wait for credit or a deadline, so look again soon while there are any.
            self._wake.wait(0.02 if scheduler.has_work else IDLE_COUNTERS_S)

    def _waits_for_readers(self) -> bool:
        """Nothing runs since readers take nothing: their fault, and bounded by slow_reader_s."""
        requests = self._scheduler.table.requests.values()
        return any(request.starved_since_s is not None for request in requests)

    def _apply(self, command: Command) -> None:
        scheduler = self._scheduler
        match command:
            case Add(request):
                scheduler.add(request)
                self._last_key = request.key
            case Cancel(key, choice):
                scheduler.cancel(key, self._clock(), choice)
            case Grant(key, tokens):
                scheduler.grant(key, tokens)
            case EndAll(cause, message):
                scheduler.end_all(cause, message, self._clock())

    def _launch(self, batch: ScheduledBatch) -> None:
        started = self._clock()
        try:
            self._runner.launch(batch)
        except FatalRunnerError:
            raise
        except Exception:
            while self._launched:
                self._commit_oldest()
            self._isolate(batch)
            return
        self._launched.append((batch, started))

    def _commit_oldest(self) -> None:
        batch, started = self._launched.popleft()
        try:
            result = self._runner.wait()
        except FatalRunnerError:
            raise
        except Exception:
            if self._launched:
                raise  # a later step was built on this one
            self._isolate(batch)
            return
        now = self._clock()
        self.stats.record(batch, now - started)
        self._scheduler.commit(result, now)

    def _isolate(self, batch: ScheduledBatch) -> None:
        self.num_isolated_steps += 1
        self._scheduler.commit(run_row_by_row(self._runner, batch), self._clock())

    def _hand_over(self, now: float) -> None:
        output = self._scheduler.take_output()
        counters = None
        has_work = self._scheduler.has_work
        due_s = self._counters_s + (BUSY_COUNTERS_S if has_work else IDLE_COUNTERS_S)
        if now >= due_s or (output.ended and not has_work):  # idle again: at once (fault B082)
            counters = self._scheduler.counters()
            self._counters_s = now
        events = self._scheduler.kv.pool.take_events()
        if output or counters is not None or events:
            self._publish(EngineUpdate(output, counters, self._last_key, events))

    def _give_up(self, error: BaseException) -> None:
        """All open requests fail at once with the cause (faults B091, B092)."""
        self.busy = False
        try:
            while self._mailbox:
                command = self._mailbox.popleft()
                if isinstance(command, Add):
                    self._scheduler.add(command.request)
            message = f"the worker's engine failed: {type(error).__name__}: {error}"
            self._scheduler.end_all(EndCause.INTERNAL, message, self._clock())
            self._publish(EngineUpdate(self._scheduler.take_output(), None, self._last_key, []))
        except Exception as second:  # the scheduler itself is what broke
            error.add_note(f"its requests could not be ended: {second!r}")
        finally:
            self._failed(error)
