"""Settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything an operator can set on a worker. Unset numbers are derived at start and printed.

    Fields carry their own help in ``HELP``.
    """

    model: str = "smollm2-135m-instruct"
    runner: str = "torch"
    listen: str = "127.0.0.1:7071"
    allow_open: bool = False
    worker_id: str = ""
    served_name: str = ""
    dtype: str = "bfloat16"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 512
    max_waiting: int = 256
    batching: str = "continuous"
    capacity: str = "on_demand"
    order: str = "priority"
    prefix_cache: bool = True
    depth: int = 0
    num_threads: int | None = None
    max_queue_s: float = 600.0
    slow_reader_s: float = 60.0
    drain_s: float = 30.0
    stall_s: float = 20.0
    decision_log: str = ""
    simulated_vocab_size: int = 49152
    simulated_base_ms: float = 10.0
    simulated_per_token_us: float = 50.0
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("runner", self.runner, ("torch", "simulated"))
        _one_of("dtype", self.dtype, ("bfloat16", "float16", "float32"))
        _one_of("batching", self.batching, ("continuous", "static"))
        _one_of("order", self.order, ("priority", "fcfs"))
        _one_of("capacity", self.capacity, ("on_demand", "reserve"))
        _at_least("block_size", self.block_size, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        _at_least("max_prefill_chunk", self.max_prefill_chunk, 1)
        _at_least("max_waiting", self.max_waiting, 0)
        _at_least("simulated_vocab_size", self.simulated_vocab_size, 2)
        for name in ("num_blocks", "kv_memory_bytes", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        for name in ("max_queue_s", "slow_reader_s", "drain_s", "stall_s"):
            _at_least(name, getattr(self, name), 0)
        for name in ("simulated_base_ms", "simulated_per_token_us"):
            _at_least(name, getattr(self, name), 0)
        if self.depth not in (0, 1):
            raise ValueError(f"depth must be 0 or 1, not {self.depth}")


HELP = {
    "model": "name in the model store (see `legato models`) or a folder with safetensors",
    "runner": "torch, or simulated (made-up text with a stated step time; needs no weights)",
    "listen": "address of the worker's port; keep it internal",
    "allow_open": "listen on other than loopback addresses although nothing is encrypted",
    "worker_id": "name in logs and answers; default: host and port",
    "served_name": "model name that clients use; default: the store's name",
    "dtype": "bfloat16, float16 or float32",
    "block_size": "tokens in a KV block",
    "num_blocks": "KV blocks; default: from kv_memory_bytes",
    "kv_memory_bytes": "memory for KV; default: a share of what is available",
    "max_model_len": "longest prompt plus answer, tokens; default: the model's own",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "tokens in one step",
    "max_prefill_chunk": "tokens of one prompt in one step",
    "max_waiting": "requests accepted beyond those that run; more are refused (QUEUE_FULL)",
    "batching": "continuous, or static (a group runs to its end; for comparison)",
    "capacity": "on_demand (preempt and recompute), or reserve (prompt + max_tokens up front)",
    "order": "priority (by request class, with ageing), or fcfs",
    "prefix_cache": "reuse the KV of equal prefixes",
    "depth": "1 = schedule the next step while one runs",
    "num_threads": "CPU threads of the model; default: the CPUs this process may use",
    "max_queue_s": "a request not started by then is ended (QUEUE_TIMEOUT)",
    "slow_reader_s": "a request whose reader takes no tokens for so long is ended (SLOW_READER)",
    "drain_s": "time for running requests after SIGTERM",
    "stall_s": "no step for so long although there is work: health turns NOT_SERVING",
    "decision_log": "file to append the scheduler's inputs and decisions to",
    "simulated_vocab_size": "simulated runner: ids that it makes up text of",
    "simulated_base_ms": "simulated runner: fixed time of a step",
    "simulated_per_token_us": "simulated runner: time per token of a step",
    "seed": "simulated runner: seed",
}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _at_least(name: str, value: float, minimum: int) -> None:
    if not minimum <= value < inf:
        raise ValueError(f"{name} must be at least {minimum} and finite, not {value}")
