"""Settings of a router process."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything an operator can set on a router. Fields carry their help in ``HELP``."""

    listen: str = "127.0.0.1:7070"
    allow_open: bool = False
    workers: tuple[str, ...] = ("127.0.0.1:7071",)
    models: tuple[str, ...] = ("smollm2-135m-instruct",)
    router_id: str = ""
    resume_key: str = ""
    max_requests: int = 4096
    max_queued: int = 1024
    max_queued_tokens: int = 4_000_000
    max_queue_s: float = 60.0
    window_tokens: int = 256
    slow_reader_s: float = 60.0
    tokenizer_threads: int = 2
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_queued_tokens", "window_tokens", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_queued", "max_queue_s", "slow_reader_s", "drain_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be finite and >= 0, not {getattr(self, name)}")
        if not self.workers:
            raise ValueError("workers must name at least one address")
        if not self.models:
            raise ValueError("models must name at least one model")
        if self.resume_key and len(self.resume_key) < 16:
            raise ValueError("resume_key must have at least 16 characters")


HELP = {
    "listen": "address for clients",
    "allow_open": "listen on other than loopback addresses although nothing is encrypted",
    "workers": "addresses of workers",
    "models": "names in the model store (see `legato models`) or folders; the router needs their "
    "tokenizers",
    "router_id": "name in logs; default: host and port",
    "resume_key": "secret shared by all routers, so that one continues another's answers; "
    "default: random, for this process alone",
    "max_requests": "requests in this router; more are refused (QUEUE_FULL)",
    "max_queued": "requests that wait for a worker with room; more are refused (QUEUE_FULL)",
    "max_queued_tokens": "prompt tokens of those that wait",
    "max_queue_s": "longest wait for a worker (QUEUE_TIMEOUT)",
    "window_tokens": "tokens that a worker may run ahead of a client",
    "slow_reader_s": "a client whose connection takes nothing for so long is ended (SLOW_READER)",
    "tokenizer_threads": "threads that tokenize prompts",
    "drain_s": "time for open requests after SIGTERM",
}
