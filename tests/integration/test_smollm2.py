"""SmolLM2 on the production engine against transformers: ids, not impressions."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from legato.block_hash import block_hash, cache_root, chain
from legato_deploy.store import ModelStore, default_root
from legato_worker.core.block_pool import BlockPool
from legato_worker.core.config import SchedulerConfig
from legato_worker.core.kv_cache import KVCacheManager
from legato_worker.core.request import Request
from legato_worker.core.scheduler import Scheduler
from legato_worker.runners.torch_loader import load_torch_runner
from legato_worker.runners.torch_runner import TorchRunner
from tokenizers import Tokenizer

from tests.smollm2_prompts import NUM_TOKENS, golden, prompts

pytestmark = [pytest.mark.model, pytest.mark.slow]
ROOT = cache_root(fingerprint="smollm2")


@pytest.fixture(scope="module")
def folder() -> Path:
    return ModelStore(default_root()).get("smollm2-135m-instruct").path


@pytest.fixture(scope="module")
def prompt_ids(folder: Path) -> list[list[int]]:
    return prompts(Tokenizer.from_file(str(folder / "tokenizer.json")))


class Run:
    """The scheduler and the real runner, stepped by hand."""

    def __init__(self, runner: TorchRunner, *, budget: int, chunk: int, num_blocks: int) -> None:
        spec = runner.spec
        self.runner = runner
        self.pool = BlockPool(num_blocks)
        config = SchedulerConfig(
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=chunk,
            max_model_len=spec.max_model_len,
            vocab_size=spec.vocab_size,
        )
        self.scheduler = Scheduler(config, KVCacheManager(self.pool, 16, block_hash))
        self.answers: dict[int, list[int]] = {}
        self.ended: list[int] = []

    def add(self, key: int, ids: list[int], max_tokens: int) -> None:
        hashes = chain(ROOT, ids, 16)
        request = Request(
            key, tuple(ids), max_tokens, block_hashes=hashes, cache_root=ROOT, arrival_s=key * 1e-3
        )
        self.answers[key] = []
        self.scheduler.add(request)

    def step(self) -> None:
        batch = self.scheduler.schedule(0.0)
        if batch is not None:
            self.runner.launch(batch)
            self.scheduler.commit(self.runner.wait(), 0.0)
        out = self.scheduler.take_output()
        for key, index, token_id in zip(out.keys, out.indices, out.ids, strict=True):
            assert index == len(self.answers[key])
            self.answers[key].append(token_id)
        self.ended += [end.key for end in out.ended]
        assert all(end.cause is None for end in out.ended)

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.scheduler.check()
        assert self.pool.num_used == 0
        assert self.pool.num_free + self.pool.num_cached == self.pool.num_blocks


def load(folder: Path, dtype: torch.dtype, num_blocks: int) -> TorchRunner:
    torch.set_num_threads(2)
    return load_torch_runner(
        folder, dtype=dtype, max_num_seqs=64, max_model_len=512, num_blocks=num_blocks
    )


def test_64_prompts_equal_transformers_at_fp32(folder: Path, prompt_ids: list[list[int]]) -> None:
    run = Run(load(folder, torch.float32, 2048), budget=256, chunk=256, num_blocks=2048)
    for key, ids in enumerate(prompt_ids):
        run.add(key, ids, NUM_TOKENS)
    run.finish()
    assert [run.answers[key] for key in range(len(prompt_ids))] == golden()


def test_bf16_differs_from_transformers_at_near_ties_only(
    folder: Path, prompt_ids: list[list[int]]
) -> None:
    """Each answer is put through transformers' bf16 model in one pass. At the first position where
    its argmax is another id, the two ids' logits must be a near-tie: closer than bf16 itself
    moves that answer's leading logits away from transformers' own fp32 ones."""
    from transformers import AutoModelForCausalLM

    run = Run(load(folder, torch.bfloat16, 2048), budget=256, chunk=256, num_blocks=2048)
    for key, ids in enumerate(prompt_ids):
        run.add(key, ids, NUM_TOKENS)
    run.finish()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    gaps, num_equal = [], 0
    with torch.inference_mode():
        for key, ids in enumerate(prompt_ids):
            answer = torch.tensor(run.answers[key])
            inputs = torch.tensor([ids + run.answers[key][:-1]])
            logits = rounded(inputs).logits[0, len(ids) - 1 :].float()
            differing = (logits.argmax(-1) != answer).nonzero().flatten().tolist()
            if not differing:
                num_equal += 1
                continue
            first = differing[0]
            gap = float(logits[first].max() - logits[first, answer[first]])
            leading = logits.topk(2).indices
            true = exact(inputs).logits[0, len(ids) - 1 :].gather(1, leading)
            noise = float((logits.gather(1, leading) - true).abs().max())
            assert gap <= noise, f"prompt {key}, token {first}: gap {gap}, bf16 noise {noise}"
            gaps.append(gap)
    print(f"{num_equal} of {len(prompt_ids)} equal to the end; largest gap {max(gaps):.3f}")
    assert num_equal >= 8


def test_pressure_changes_no_token(folder: Path, prompt_ids: list[list[int]]) -> None:
    """64 requests with cancels, KV for a fraction of them (so preemption is forced), chunks of 7,
    and prefix hits: every row equals its solo run, which the golden answers are."""
    runner = load(folder, torch.float32, 96)
    runner.poison_free_blocks()
    run = Run(runner, budget=96, chunk=7, num_blocks=96)
    expected, draw = golden(), random.Random(3)
    # Every other request repeats an earlier prompt, or begins with it.
    lengths = {}
    for key in range(64):
        source = key if key % 2 == 0 else draw.randrange(0, key, 2)
        lengths[key] = (source, draw.randint(8, 40))
        run.add(key, prompt_ids[source], lengths[key][1])
    cancelled = draw.sample(range(64), 12)
    for number in range(40):
        run.step()
        if number % 3 == 0 and number // 3 < len(cancelled):
            run.scheduler.cancel(cancelled[number // 3], 0.0)
    run.finish()
    counters = run.scheduler.counters()
    assert sorted(run.ended) == list(range(64)), "one terminal event each"
    assert counters.preemptions > 0
    assert counters.prefix_hit_tokens > 0
    for key, (source, length) in lengths.items():
        answer = run.answers[key]
        assert answer == expected[source][: len(answer)], key
        assert key in cancelled or len(answer) == length


def test_start_is_quick(folder: Path) -> None:
    """Loading must not touch all the memory that the KV pool may come to use."""
    started = time.monotonic()
    load_torch_runner(folder, dtype=torch.bfloat16, max_num_seqs=64)
    assert time.monotonic() - started < 30
