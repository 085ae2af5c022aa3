"""Host cost of a step: ``python -m tests.bench.bench_scheduler [--rows 1 64 256 1024]``.

Each row decodes at a context of about 512 tokens (lengths are staggered, so that in each step one
row in sixteen fills a block, hashes and registers it, and takes a new one). No runner: what is
timed is ``schedule``, and ``commit`` together with ``take_output``. Prints one JSON line per number
of rows, with medians in microseconds per step.
"""

from __future__ import annotations

import argparse
import gc
import json
from statistics import median
from time import perf_counter

from legato.block_hash import block_hash, cache_root
from legato_worker.core.batch import StepResult
from legato_worker.core.block_pool import BlockPool
from legato_worker.core.config import SchedulerConfig
from legato_worker.core.kv_cache import KVCacheManager
from legato_worker.core.request import Request
from legato_worker.core.scheduler import Scheduler

BLOCK_SIZE = 16
CONTEXT = 512
VOCAB_SIZE = 49152
EOS = frozenset({0})


def decoding(rows: int) -> Scheduler:
    """A scheduler whose ``rows`` sequences have computed their prompts and decode from now on."""
    pool = BlockPool(rows * 2 * CONTEXT // BLOCK_SIZE, record_events=True)
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=rows * 2 * CONTEXT,
        max_prefill_chunk=2 * CONTEXT,
        max_model_len=8192,
        vocab_size=VOCAB_SIZE,
    )
    scheduler = Scheduler(config, KVCacheManager(pool, BLOCK_SIZE, block_hash))
    root = cache_root(fingerprint="bench")
    for key in range(rows):
        length = CONTEXT - BLOCK_SIZE // 2 + key % BLOCK_SIZE
        prompt = tuple(1 + (key * 7919 + i * 31) % (VOCAB_SIZE - 1) for i in range(length))
        scheduler.add(
            Request(key, prompt, CONTEXT, stop_token_ids=EOS, cache_root=root, deadline_s=1e9)
        )
    while len(scheduler.table.running) < rows:
        step(scheduler, 0)
    return scheduler


def step(scheduler: Scheduler, number: int) -> tuple[float, float, float]:
    """One step; returns the times before it, between its halves and after it."""
    started = perf_counter()
    batch = scheduler.schedule(number * 0.01)
    scheduled = perf_counter()
    if batch is None:
        raise RuntimeError("nothing to run")
    ids = [1 + (number * 131 + index) % (VOCAB_SIZE - 1) for index in range(len(batch.samples))]
    result = StepResult(batch.step, ids)
    committing = perf_counter()
    scheduler.commit(result, number * 0.01)
    scheduler.take_output()
    committed = perf_counter()
    scheduler.kv.pool.take_events()
    return scheduled - started, committed - committing, committed - committing + scheduled - started


def measure(rows: int, steps: int) -> dict[str, float | int]:
    scheduler = decoding(rows)
    gc.collect()
    gc.freeze()
    times = [step(scheduler, number) for number in range(1, steps + 1)]
    gc.unfreeze()
    schedule, commit, both = ([column * 1e6 for column in row] for row in zip(*times, strict=True))
    return {
        "rows": rows,
        "context": CONTEXT,
        "steps": steps,
        "schedule_us": round(median(schedule), 1),
        "commit_us": round(median(commit), 1),
        "total_us": round(median(both), 1),
        "us_per_row": round(median(both) / rows, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of schedule and commit per step.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200, help="steps timed per number of rows")
    arguments = parser.parse_args()
    for rows in arguments.rows:
        print(json.dumps(measure(rows, arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
