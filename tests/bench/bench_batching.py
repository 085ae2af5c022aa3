"""Continuous against static batching: one engine, one model, one workload.

``python -m tests.bench.bench_batching`` alternates the two policies of the scheduler over the same
requests and prints throughput and p95 of end-to-end time and of time to first token, side by side.
The workload mixes short and long answers, as chat and summaries do, and arrives over time: that is
where a fixed group makes short answers wait for long ones, and new requests for the whole group.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

from legato_worker.config import WorkerConfig

from .offline import Job, Timing, load_smollm2, quantile, run

SEATS = 8


def workload(num_requests: int, rate: float, seed: int) -> list[Job]:
    """Prompts of 16 to 192 tokens; four of five answers are short (8 to 32 tokens), one is long (96
    to 160); Poisson arrivals at ``rate`` per second."""
    draw = random.Random(seed)
    jobs, due = [], 0.0
    for _ in range(num_requests):
        prompt = tuple(draw.randrange(1000, 40000) for _ in range(draw.randint(16, 192)))
        answer = draw.randint(96, 160) if draw.random() < 0.2 else draw.randint(8, 32)
        jobs.append(Job(prompt, answer, due))
        due += draw.expovariate(rate)
    return jobs


def summary(jobs: list[Job], timings: list[Timing]) -> dict[str, float]:
    wall_s = max(timing.token_s[-1] for timing in timings)
    e2e = [timing.e2e_s for timing in timings]
    ttft = [timing.ttft_s for timing in timings]
    return {
        "tokens_per_s": sum(job.num_tokens for job in jobs) / wall_s,
        "e2e_p95_s": quantile(e2e, 0.95),
        "e2e_p50_s": quantile(e2e, 0.5),
        "ttft_p95_s": quantile(ttft, 0.95),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rate", type=float, default=6.0, help="arrivals per second")
    parser.add_argument("--rounds", type=int, default=3, help="alternations; medians are printed")
    arguments = parser.parse_args()
    jobs = workload(arguments.requests, arguments.rate, seed=1)
    results: dict[str, list[dict[str, float]]] = {"static": [], "continuous": []}
    runner = load_smollm2(max_num_seqs=SEATS)
    for _ in range(arguments.rounds):
        for policy, found in results.items():
            config = WorkerConfig(max_num_seqs=SEATS, batching=policy, prefix_cache=False)
            found.append(summary(jobs, run(jobs, config, runner)))
    median = {
        policy: {name: statistics.median(r[name] for r in found) for name in found[0]}
        for policy, found in results.items()
    }
    print(f"{len(jobs)} requests, {arguments.rate:g}/s, {SEATS} seats, {arguments.rounds} rounds")
    print(f"{'':14}{'static':>10}{'continuous':>12}{'ratio':>8}")
    for name in median["static"]:
        static, continuous = median["static"][name], median["continuous"][name]
        print(f"{name:14}{static:10.2f}{continuous:12.2f}{continuous / static:8.2f}")
    print(json.dumps(median))


if __name__ == "__main__":
    main()
