"""Draws the three-request example from what the production scheduler decides.

Two seats. A needs 2 steps, B needs 4, C needs 2. ``python docs/pictures/three_requests.py`` writes
``three_requests.svg`` beside this file. Each request's first step computes its prompt and gives its
first token; so a request of k tokens takes k steps.
"""

from __future__ import annotations

from pathlib import Path

from legato.block_hash import block_hash
from legato_worker.core.block_pool import BlockPool
from legato_worker.core.config import SchedulerConfig
from legato_worker.core.kv_cache import KVCacheManager
from legato_worker.core.policies import BatchingPolicy, Continuous, Static
from legato_worker.core.request import Request
from legato_worker.core.scheduler import Scheduler
from legato_worker.runners.simulated import SimulatedConfig, SimulatedRunner

NEEDS = {"A": 2, "B": 4, "C": 2}
COLOURS = {"A": "#3b6ea5", "B": "#c8803a", "C": "#4f8f5b"}
CELL, ROW, LEFT, TOP = 84, 44, 120, 64


def seats_by_step(batching: BatchingPolicy) -> list[list[str | None]]:
    """Who sits on each of the two seats in each step."""
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_prefill_chunk=64,
        max_model_len=64,
        vocab_size=100,
        batching=batching,
    )
    scheduler = Scheduler(config, KVCacheManager(BlockPool(16), 16, block_hash))
    runner = SimulatedRunner(
        SimulatedConfig(vocab_size=100, num_blocks=16, max_num_seqs=2), lambda _: None
    )
    names = list(NEEDS)
    for key, name in enumerate(names):
        scheduler.add(Request(key, (key + 1, 7, 9), NEEDS[name], arrival_s=float(key)))
    steps = []
    while scheduler.has_work:
        batch = scheduler.schedule(0.0)
        assert batch is not None
        seats: list[str | None] = [None, None]
        for sequence in scheduler.table.running:
            seats[sequence.slot] = names[sequence.owner.request.key]
        steps.append(seats)
        runner.launch(batch)
        scheduler.commit(runner.wait(), 0.0)
    return steps


def panel(title: str, steps: list[list[str | None]], top: int) -> list[str]:
    start_of_c = next(i for i, seats in enumerate(steps) if "C" in seats)
    lines = [f'<text x="{LEFT}" y="{top - 14}" class="title">{title}</text>']
    for seat in range(2):
        y = top + seat * ROW
        lines.append(f'<text x="{LEFT - 12}" y="{y + 27}" class="label">seat {seat + 1}</text>')
        for step, seats in enumerate(steps):
            x, name = LEFT + step * CELL, seats[seat]
            fill = COLOURS[name] if name else "#eeeeee"
            size = f'width="{CELL - 4}" height="{ROW - 6}"'
            lines.append(f'<rect x="{x}" y="{y}" {size} rx="5" fill="{fill}"/>')
            if name:
                lines.append(
                    f'<text x="{x + CELL / 2 - 2}" y="{y + 25}" class="name">{name}</text>'
                )
            else:
                lines.append(f'<text x="{x + CELL / 2 - 2}" y="{y + 25}" class="idle">idle</text>')
    for step in range(len(steps)):
        x = LEFT + step * CELL + CELL / 2 - 2
        lines.append(f'<text x="{x}" y="{top + 2 * ROW + 16}" class="step">step {step + 1}</text>')
    note = f"C starts after step {start_of_c}; all done after step {len(steps)}"
    lines.append(f'<text x="{LEFT}" y="{top + 2 * ROW + 42}" class="note">{note}</text>')
    return lines


def main() -> None:
    static, continuous = seats_by_step(Static()), seats_by_step(Continuous())
    width = LEFT + CELL * max(len(static), len(continuous)) + 24
    second = TOP + 2 * ROW + 110
    height = second + 2 * ROW + 64
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        'aria-label="Fixed batch against continuous batching on two seats">',
        "<style>text{font-family:system-ui,sans-serif;fill:#222}"
        ".title{font-size:17px;font-weight:600}.label{font-size:14px;text-anchor:end}"
        ".name{font-size:18px;font-weight:600;text-anchor:middle;fill:#fff}"
        ".idle{font-size:13px;text-anchor:middle;fill:#777}"
        ".step{font-size:13px;text-anchor:middle;fill:#555}.note{font-size:14px}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *panel("Fixed batch: a group runs to its end", static, TOP),
        *panel("Continuous batching: a seat is free after each step", continuous, second),
        "</svg>",
    ]
    target = Path(__file__).with_suffix(".svg")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(target.name)


if __name__ == "__main__":
    main()
