"""The scheduler's inputs and decisions as an append-only file, one JSON array per line.

It holds what a replay needs and no prompt text: ids appear only as the chained hashes of full
blocks. Lines, by their first element:

- ``add``: key, arrival, prompt length, max_tokens, n, class, deadline, credit, block hashes (first
  8 bytes, hex), cache root (likewise), resumed lengths
- ``cancel``: time, key, choice or null
- ``grant``: key, tokens
- ``step``: time, step number, [slot, start, count] per row, number of samples, attached slots,
  copies; step number null when nothing ran
- ``result``: time, step number, ids' count, failed samples
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from .core.batch import ScheduledBatch, StepResult
from .core.request import Request

FORMAT = ["legato-decisions", 1]


class DecisionLog:
    """Implements the core's DecisionSink. Called from the engine thread; buffered writes."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._idle = False
        self._write(FORMAT)

    @classmethod
    def open(cls, path: Path) -> DecisionLog:
        return cls(path.open("a", buffering=1 << 16, encoding="utf-8"))

    def added(self, request: Request) -> None:
        self._write(
            [
                "add",
                request.key,
                request.arrival_s,
                len(request.prompt_ids),
                request.max_tokens,
                request.n,
                int(request.request_class),
                request.deadline_s,
                request.credit,
                [block_hash[:8].hex() for block_hash in request.block_hashes],
                request.cache_root[:8].hex(),
                [-1 if choice.finished else len(choice.ids) for choice in request.resume],
            ]
        )

    def cancelled(self, now: float, key: int, choice: int | None) -> None:
        self._write(["cancel", now, key, choice])

    def granted(self, key: int, tokens: int) -> None:
        self._write(["grant", key, tokens])

    def scheduled(self, now: float, batch: ScheduledBatch | None) -> None:
        if batch is None:
            if not self._idle:  # once per idle time, not per look
                self._write(["step", now, None])
            self._idle = True
            return
        self._idle = False
        rows = list(zip(batch.slots, batch.starts, batch.counts, strict=True))
        attached = [row.slot for row in batch.attached]
        self._write(["step", now, batch.step, rows, len(batch.samples), attached, batch.copies])

    def committed(self, now: float, result: StepResult) -> None:
        self._write(["result", now, result.step, len(result.token_ids), sorted(result.failed)])

    def close(self) -> None:
        self._file.close()

    def _write(self, record: list[object]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
