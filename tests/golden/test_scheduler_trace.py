"""The scheduler's decisions for one fixed scenario, step by step, as text.

A change of this text is a change of behaviour that every user of the scheduler sees; the commit
that makes it says why. ``LEGATO_UPDATE_GOLDEN=1 python -m pytest tests/golden`` writes it anew.
"""

from __future__ import annotations

import os
from difflib import unified_diff
from pathlib import Path

import pytest
from legato_worker.core.request import RequestClass

from tests.unit.core.driver import Driver, prompt_of


def trace(depth: int) -> str:
    """Chunks, a prefix hit, a fork with its copies, preemption, a cancel, urgency: 7 requests."""
    driver = Driver(
        num_blocks=16, block_size=4, max_num_seqs=4, budget=16, chunk=8, max_bypass=2, depth=depth
    )
    lines = ["# step: choice slot [start:end) >position of each sampled id"]
    names: dict[int, str] = {}

    def add(name: str, prompt: list[int], max_tokens: int, **fields: object) -> int:
        key = driver.add(prompt, max_tokens, **fields)
        names[key] = name
        lines.append(f"add {name}: {len(prompt)} tokens, max_tokens {max_tokens}")
        return key

    def turn() -> None:
        scheduler = driver.scheduler
        before = {key: owner.preemptions for key, owner in scheduler.table.requests.items()}
        launched = driver.launch()
        if launched:
            batch = scheduler._in_flight[-1].batch
            cells = [
                f"{names[row.key]}.{row.choice} s{batch.slots[index]} "
                f"[{row.start}:{row.start + row.count})"
                + "".join(f" >{s.position}@s{s.slot}" for s in batch.samples if s.row == index)
                for index, row in enumerate(driver.steps[-1])
            ]
            lines.append(f"step {batch.step}: " + " | ".join(cells))
            lines.extend(f"  copy block {source} to {target}" for source, target in batch.copies)
        else:
            lines.append("nothing to launch")
        for key, owner in scheduler.table.requests.items():
            if owner.preemptions > before.get(key, 0):
                lines.append(f"  {names[key]} lost its KV")
        if scheduler.num_in_flight > (depth if launched else 0):
            driver.commit()
        ended = set(driver.ended)
        driver.collect()
        lines.extend(
            f"  {names[key]} ended: {end.reason.name}, {end.cached_tokens} cached, "
            f"{end.recomputed_tokens} recomputed"
            for key, end in driver.ended.items()
            if key not in ended
        )
        scheduler.check()
        driver.now += 0.01

    add("A", prompt_of(18), 12)
    add("B", prompt_of(6, 1), 14, n=2)
    for _ in range(3):
        turn()
    add("C", [*prompt_of(18), 5, 6], 4)
    add("D", prompt_of(30, 2), 3)
    add("E", prompt_of(5, 3), 5, request_class=RequestClass.INTERACTIVE)
    for _ in range(4):
        turn()
    cancelled = add("F", prompt_of(9, 4), 9)
    add("G", prompt_of(3, 5), 9, request_class=RequestClass.BATCH)
    for _ in range(6):
        turn()
    driver.cancel(cancelled)
    lines.append("cancel F")
    while driver.scheduler.has_work:
        turn()
    driver.assert_idle()
    assert driver.scheduler.table.num_preemptions > 0, "the scenario must contain a preemption"
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("depth", [0, 1])
def test_scheduler_trace(depth: int) -> None:
    path = Path(__file__).with_name(f"scheduler_trace_depth_{depth}.txt")
    actual = trace(depth)
    if os.environ.get("LEGATO_UPDATE_GOLDEN"):
        path.write_text(actual, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    if actual != expected:
        diff = unified_diff(
            expected.splitlines(), actual.splitlines(), path.name, "this run", lineterm="", n=2
        )
        pytest.fail(
            "the scheduler decides otherwise than before:\n"
            + "\n".join(diff)
            + "\nIf this is meant: LEGATO_UPDATE_GOLDEN=1 python -m pytest tests/golden, read the "
            "new file, and say why in the commit.",
            pytrace=False,
        )
