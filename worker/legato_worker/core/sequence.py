"""The scheduler's state of a request and of its sequences. Owned by the scheduler alone."""

from __future__ import annotations

from enum import IntEnum

from .block_pool import Lineage
from .request import FinishReason, Request

Rank = tuple[int, float, int, int]
"""Order of service: protected first, then by arrival and class, request, choice."""


class State(IntEnum):
    WAITING = 0  # holds no KV; new, or preempted
    RUNNING = 1  # holds a slot and blocks
    FINISHED = 2


class RequestState:
    """One request: its live sequences, its credit, and what is reported when it ends."""

    __slots__ = (
        "bypassed",
        "cached_tokens",
        "credit",
        "first_step_s",
        "num_prompt_logprobs",
        "order_key",
        "preemptions",
        "reason",
        "recomputed_tokens",
        "request",
        "sequences",
        "starved_since_s",
    )

    def __init__(self, request: Request, order_key: float) -> None:
        self.request = request
        self.order_key = order_key
        self.credit = request.credit
        self.sequences: dict[int, Sequence] = {}  # by choice; ended ones are removed
        self.cached_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.bypassed = 0
        self.num_prompt_logprobs = 0  # entries delivered, so that recompute repeats none
        self.first_step_s: float | None = None
        self.starved_since_s: float | None = None  # out of credit since
        self.reason = FinishReason.STOP

    def add_credit(self, tokens: int) -> None:
        self.credit += tokens
        self.starved_since_s = None


class Sequence:
    """One token history. ``num_computed`` chases ``num_tokens``; a step narrows the gap.

    ``num_computed`` counts positions whose KV is written or being written by a launched step.
    ``num_in_flight`` ids have been promised by launched steps and are not in ``token_ids`` yet.
    Blocks and slot belong to a RUNNING sequence only.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "choice",
        "last_step",
        "lineage",
        "max_computed",
        "max_num_tokens",
        "num_computed",
        "num_in_flight",
        "num_prompt",
        "num_registered",
        "num_waiting_forks",
        "owner",
        "preemptions",
        "rank",
        "slot",
        "state",
        "token_ids",
    )

    def __init__(self, owner: RequestState, choice: int, token_ids: list[int]) -> None:
        self.owner = owner
        self.choice = choice
        self.token_ids = token_ids
        self.num_prompt = len(owner.request.prompt_ids)
        self.max_num_tokens = self.num_prompt + owner.request.max_tokens
        self.block_hashes: list[bytes] = list(owner.request.block_hashes)
        self.num_computed = 0
        self.max_computed = 0  # highest num_computed ever: what is below it again is recomputed
        self.num_in_flight = 0
        self.block_ids: list[int] = []
        self.num_registered = 0  # leading blocks whose content is known to the pool
        self.lineage: Lineage = owner.request.cache_root
        self.slot = -1
        self.state = State.WAITING
        self.last_step = 0  # last step whose batch held this sequence
        self.preemptions = 0
        self.num_waiting_forks = 0  # choices that will share this prompt when it is computed
        self.rank: Rank = (1, owner.order_key, owner.request.key, choice)

    def yields_to(self, other: Sequence) -> bool:
        """Whether ``other`` may take this one's KV: it comes first, and this one is not protected
        by having lost its KV too often."""
        return self.rank > other.rank and self.rank[0] > 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output(self) -> int:
        """Ids of the answer, those in flight included."""
        return len(self.token_ids) + self.num_in_flight - self.num_prompt
