"""How a pull shows what it is doing: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress, TaskID

_QUIET_S = 5.0  # between two lines about one stage


class Progress(Protocol):
    """Told by a pull what it does. A stage lasts until the next one begins."""

    def stage(self, title: str, num_bytes: int) -> None:
        """Begins a stage that will go through ``num_bytes``."""

    def advance(self, num_bytes: int) -> None:
        """``num_bytes`` more of the stage are done."""

    def say(self, text: str) -> None:
        """One line for the reader."""


@contextmanager
def console_progress(console: Console) -> Iterator[Progress]:
    """The progress that fits ``console``."""
    if not console.is_terminal:
        yield LineProgress(
            lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        )
        return
    from rich import progress as rich

    bars = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(bar_width=20),
        rich.DownloadColumn(),
        rich.TimeElapsedColumn(),
        console=console,
    )
    try:
        yield BarProgress(bars)
    finally:
        bars.stop()


class BarProgress:
    """One bar per stage. Owns nothing: the caller stops ``bars``."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def stage(self, title: str, num_bytes: int) -> None:
        self._task = self._bars.add_task(title, total=num_bytes)
        self._bars.start()  # not before: other programs may have drawn bars of their own

    def advance(self, num_bytes: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, num_bytes)

    def say(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)


class LineProgress:
    """A line when a stage begins, and one every five seconds while it lasts."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._title, self._total, self._done = "", 0, 0
        self._last_s = 0.0

    def stage(self, title: str, num_bytes: int) -> None:
        self._title, self._total, self._done = title, num_bytes, 0
        self._last_s = self._clock()
        self._write(f"{title} ({num_bytes / 1e6:,.0f} MB)")

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now_s = self._clock()
        if now_s - self._last_s >= _QUIET_S and self._total:
            self._last_s = now_s
            self._write(f"{self._title}: {min(100, 100 * self._done // self._total)}%")

    def say(self, text: str) -> None:
        self._write(text)
