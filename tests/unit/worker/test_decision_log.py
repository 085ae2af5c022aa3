"""The decision log: valid lines, in order, without a prompt's ids."""

from __future__ import annotations

import json
from pathlib import Path

from legato.block_hash import block_hash, cache_root, chain
from legato_worker.core.block_pool import BlockPool
from legato_worker.core.config import SchedulerConfig
from legato_worker.core.kv_cache import KVCacheManager
from legato_worker.core.request import Request
from legato_worker.core.scheduler import Scheduler
from legato_worker.decision_log import FORMAT, DecisionLog
from legato_worker.runners.simulated import SimulatedConfig, SimulatedRunner


def test_every_input_and_decision_is_a_line(tmp_path: Path) -> None:
    log = DecisionLog.open(tmp_path / "decisions.jsonl")
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_prefill_chunk=16,
        max_model_len=256,
        vocab_size=100_000,
    )
    scheduler = Scheduler(config, KVCacheManager(BlockPool(16), 16, block_hash), log)
    runner = SimulatedRunner(
        SimulatedConfig(vocab_size=100_000, num_blocks=16, max_num_seqs=4), lambda _: None
    )
    prompt = tuple(range(77_000, 77_040))
    root = cache_root(fingerprint="x")
    hashes = chain(root, prompt, 16)
    for key in (1, 2):
        scheduler.add(Request(key, prompt, 5, block_hashes=hashes, cache_root=root))
    now, steps = 0.0, 0
    while scheduler.has_work:
        now += 0.25
        batch = scheduler.schedule(now)
        if batch is not None:
            runner.launch(batch)
            scheduler.commit(runner.wait(), now)
            steps += 1
        if steps == 3:
            scheduler.cancel(2, now)
            scheduler.grant(1, 10)
    log.close()
    text = (tmp_path / "decisions.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0] == FORMAT
    kinds = [line[0] for line in lines[1:]]
    assert kinds[:2] == ["add", "add"]
    assert kinds.count("result") == steps
    assert kinds.count("step") >= steps and "cancel" in kinds and "grant" in kinds
    numbers = [line[2] for line in lines if line[0] == "result"]
    assert numbers == list(range(1, steps + 1))
    assert "77001" not in text and hashes[0][:8].hex() in text
