"""Legato over gRPC against transformers' padded static batch, on one 16-request mix.

``python -m tests.bench.bench_mix`` alternates the two in one run (default three rounds) and prints
the medians side by side: output tokens per second, p95 of time to first token, p95 of the gap
between tokens. Both get the same ids and the same output lengths, greedy, end ids ignored, all sent
at once; Legato's prefix cache is off. ``--workload FILE`` takes another mix:
``{"reqs": [{"id": 0, "prompt_ids": [...], "max_tokens": 54}, ...]}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from legato.client import Client
from legato_deploy.local_system import LocalSystem
from legato_deploy.store import ModelStore, default_root

from .offline import quantile

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Item:
    prompt_ids: list[int]
    max_tokens: int


Stamps = list[list[float]]


def default_mix() -> list[Item]:
    """16 requests: about 3,800 prompt tokens and 1,900 output tokens, lengths as in chat."""
    draw = random.Random(16)
    lengths = [(draw.randint(60, 420), draw.randint(50, 190)) for _ in range(16)]
    return [
        Item([draw.randrange(1000, 40000) for _ in range(prompt)], output)
        for prompt, output in lengths
    ]


async def legato_round(client: Client, items: list[Item]) -> Stamps:
    async def one(item: Item, started: float) -> list[float]:
        stamps = []
        stream = client.stream(
            token_ids=item.prompt_ids, max_tokens=item.max_tokens, ignore_eos=True
        )
        async for delta in stream:
            stamps += [time.perf_counter() - started] * len(delta.ids)
        return stamps

    started = time.perf_counter()
    return list(await asyncio.gather(*[one(item, started) for item in items]))


class Padded:
    """transformers: left-padded, every row runs to the longest output; a row's own tokens count."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def round(self, items: list[Item]) -> Stamps:
        from transformers import StoppingCriteria, StoppingCriteriaList

        stamps: list[float] = []

        class Stamp(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
                stamps.append(time.perf_counter() - started)
                return torch.zeros(ids.shape[0], dtype=torch.bool)

        width = max(len(item.prompt_ids) for item in items)
        longest = max(item.max_tokens for item in items)
        ids = torch.full((len(items), width), 2)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, width - len(item.prompt_ids) :] = torch.tensor(item.prompt_ids)
            mask[row, width - len(item.prompt_ids) :] = 1
        started = time.perf_counter()
        self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([Stamp()]),
        )
        return [stamps[: item.max_tokens] for item in items]


def summary(stamps: Stamps) -> dict[str, float]:
    gaps = [after - before for row in stamps for before, after in pairwise(row)]
    return {
        "tokens_per_s": sum(map(len, stamps)) / max(row[-1] for row in stamps),
        "ttft_p95_ms": 1e3 * quantile([row[0] for row in stamps], 0.95),
        "itl_p95_ms": 1e3 * quantile(gaps, 0.95),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    items = default_mix()
    if arguments.workload:
        items = [
            Item(entry["prompt_ids"], entry["max_tokens"])
            for entry in json.loads(arguments.workload.read_text())["reqs"]
        ]
    results: dict[str, list[dict[str, float]]] = {"legato": [], "padded": []}
    padded = Padded(ModelStore(default_root()).get(MODEL).path)
    options = ("--no-prefix-cache", "--dtype", arguments.dtype, "--max-num-seqs", "16")
    system = LocalSystem(model=MODEL, port=0, worker_options=options)
    try:
        await system.start()
        async with Client(system.address) as client:
            await legato_round(client, items[:2])  # warm up
            for _ in range(arguments.rounds):
                results["legato"].append(summary(await legato_round(client, items)))
                results["padded"].append(summary(await asyncio.to_thread(padded.round, items)))
    finally:
        await system.stop()
    median = {
        name: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        for name, rounds in results.items()
    }
    tokens = sum(len(item.prompt_ids) for item in items), sum(item.max_tokens for item in items)
    print(f"{len(items)} requests, {tokens[0]} prompt and {tokens[1]} output tokens, bf16 weights")
    print(f"{'':14}{'padded batch':>14}{'legato':>10}{'ratio':>8}")
    for key in median["legato"]:
        ours, theirs = median["legato"][key], median["padded"][key]
        print(f"{key:14}{theirs:14.1f}{ours:10.1f}{ours / theirs:8.2f}")
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main())
