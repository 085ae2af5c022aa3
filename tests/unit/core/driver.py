"""Drives the production scheduler with the simulated runner, step by step."""

from __future__ import annotations

from collections import defaultdict

from legato.block_hash import block_hash, cache_root, chain
from legato_worker.core.block_pool import BlockPool
from legato_worker.core.config import SchedulerConfig
from legato_worker.core.kv_cache import BlockHash, KVCacheManager
from legato_worker.core.output import EndedRequest
from legato_worker.core.request import Request, SamplingParams
from legato_worker.core.scheduler import Scheduler
from legato_worker.runners.simulated import SimulatedConfig, SimulatedRunner

ROOT = cache_root(fingerprint="test")


class Driver:
    """An engine loop by hand. ``depth`` steps are launched before the oldest is committed."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        chunk: int = 64,
        depth: int = 0,
        block_size: int = 16,
        prefix_cache: bool = True,
        hash_function: BlockHash = block_hash,
        runner: dict[str, object] | None = None,
        **config: object,
    ) -> None:
        simulated = SimulatedConfig(
            vocab_size=1000,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            verify=True,
            **(runner or {}),  # type: ignore[arg-type]
        )
        self.pool = BlockPool(num_blocks)
        self.kv = KVCacheManager(self.pool, block_size, hash_function, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(budget, max_num_seqs),
                max_prefill_chunk=chunk,
                max_model_len=8192,
                vocab_size=1000,
                **config,  # type: ignore[arg-type]
            ),
            self.kv,
        )
        self.hash_function = hash_function
        self.runner = SimulatedRunner(simulated, sleep=lambda _: None)
        self.depth = depth
        self.now = 0.0
        self.key = 0
        self.answers: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.requests: dict[int, Request] = {}
        self.ended: dict[int, EndedRequest] = {}
        self.finished_at: dict[int, int] = {}
        self.token_steps: dict[tuple[int, int], list[int]] = defaultdict(list)

    def add(self, prompt: list[int], max_tokens: int = 8, **fields: object) -> int:
        self.key += 1
        root = fields.pop("cache_root", ROOT)
        hashes = chain(root, prompt, self.kv.block_size)  # type: ignore[arg-type]
        if self.hash_function is not block_hash:
            hashes = ()
        sampling = fields.pop("sampling", None) or SamplingParams(temperature=1.0, seed=7)
        self.requests[self.key] = Request(
            self.key,
            tuple(prompt),
            max_tokens,
            sampling=sampling,  # type: ignore[arg-type]
            arrival_s=self.now,
            block_hashes=hashes,
            cache_root=root,  # type: ignore[arg-type]
            **fields,  # type: ignore[arg-type]
        )
        self.scheduler.add(self.requests[self.key])
        return self.key

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        scheduler = self.scheduler
        batch = scheduler.schedule(self.now)
        if batch is not None:
            self.runner.launch(batch)
        if scheduler.num_in_flight > (self.depth if batch is not None else 0):
            scheduler.commit(self.runner.wait(), self.now)
        self.collect()
        scheduler.check()
        self.now += 0.01
        return batch is not None or scheduler.num_in_flight > 0

    def collect(self) -> None:
        out = self.scheduler.take_output()
        for key, choice, index, token_id in zip(
            out.keys, out.choices, out.indices, out.ids, strict=True
        ):
            answer = self.answers[key, choice]
            assert index == len(answer) + self.offset(key, choice), "deltas must be contiguous"
            answer.append(token_id)
            self.token_steps[key, choice].append(out.step)
        for end in out.ended:
            assert end.key not in self.ended, "a request ended twice"
            self.ended[end.key] = end
            self.finished_at[end.key] = out.step

    def offset(self, key: int, choice: int) -> int:
        resume = self.requests[key].resume
        return len(resume[choice].ids) if resume else 0

    def run(self, max_steps: int = 10_000) -> int:
        """Steps until all requests have ended; fails when that takes more than ``max_steps``."""
        for steps in range(max_steps):
            if not self.scheduler.has_work:
                return steps
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def assert_idle(self) -> None:
        """Everything given out has come back (faults B028, B037)."""
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert self.pool.num_used == 0 and self.kv.num_fenced == 0
        assert len(scheduler.table.free_slots) == scheduler.config.max_num_seqs
        assert not scheduler.table.running and not len(scheduler.table.waiting)
        scheduler.check()


def solo(prompt: list[int], max_tokens: int, choice: int = 0, **fields: object) -> list[int]:
    """The answer to a request alone on a fresh, roomy worker without a prefix cache."""
    driver = Driver(num_blocks=512, prefix_cache=False)
    n = max(choice + 1, int(str(fields.pop("n", 1))))
    key = driver.add(prompt, max_tokens, n=n, **fields)
    driver.run()
    return driver.answers[key, choice]
