"""Runs a workload through the production engine in this process, without gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from legato.block_hash import cache_root, chain
from legato_worker.config import WorkerConfig
from legato_worker.core.request import Request
from legato_worker.engine import Add, Engine, EngineUpdate
from legato_worker.runners.base import Runner
from legato_worker.serve import build_scheduler

ROOT = cache_root(fingerprint="bench")


@dataclass(frozen=True)
class Job:
    """One request: due at ``due_s`` after the start; exactly ``num_tokens`` are generated."""

    prompt_ids: tuple[int, ...]
    num_tokens: int
    due_s: float = 0.0


@dataclass
class Timing:
    due_s: float
    token_s: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.token_s[-1] - self.due_s


def run(jobs: list[Job], config: WorkerConfig, runner: Runner) -> list[Timing]:
    """Times from each job's due time, so that a late start counts as waiting."""
    timings = [Timing(job.due_s) for job in jobs]
    remaining = threading.Semaphore(0)
    started = 0.0

    def publish(update: EngineUpdate) -> None:
        now = time.perf_counter() - started
        for key, token_id in zip(update.output.keys, update.output.ids, strict=True):
            timings[key].token_s.append(now)
            timings[key].ids.append(token_id)
        for end in update.output.ended:
            assert end.cause is None, end
            remaining.release()

    scheduler = build_scheduler(config, runner, None)
    engine = Engine(
        scheduler,
        runner,
        depth=config.depth,
        clock=time.perf_counter,
        publish=publish,
        failed=_raise,
    )
    engine.start()
    started = time.perf_counter()
    for key, job in sorted(enumerate(jobs), key=lambda item: item[1].due_s):
        time.sleep(max(0.0, job.due_s - (time.perf_counter() - started)))
        engine.send(
            Add(
                Request(
                    key,
                    job.prompt_ids,
                    job.num_tokens,
                    arrival_s=time.perf_counter(),
                    block_hashes=chain(ROOT, job.prompt_ids, runner.spec.block_size),
                    cache_root=ROOT,
                )
            )
        )
    for _ in jobs:
        remaining.acquire()
    engine.stop(5.0)
    return timings


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def load_smollm2(**options: object) -> Runner:
    """The model that `make model` pulls, on this machine's CPU."""
    from legato_deploy.store import ModelStore, default_root
    from legato_worker.serve import ModelSource, build_runner

    stored = ModelStore(default_root()).get("smollm2-135m-instruct")
    source = ModelSource(stored.name, Path(stored.path), stored.fingerprint)
    return build_runner(WorkerConfig(**options), source)  # type: ignore[arg-type]


def _raise(error: BaseException) -> None:
    raise error


Loader = Callable[[], Runner]
