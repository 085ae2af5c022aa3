"""From the engine's output to frames: the edge where core data becomes protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from legato.v1 import inference_pb2, worker_pb2 as pb

from .core.batch import TokenLogprobs
from .core.output import Counters, EndedRequest
from .link import RouterLink
from .step_stats import StepStats

Ids = Sequence[int]


def snapshot(
    counters: Counters,
    stats: StepStats,
    *,
    promised_blocks: int,
    last_applied_seq: int,
    draining: bool,
) -> pb.Snapshot:
    return pb.Snapshot(
        step=counters.step,
        free_blocks=counters.free_blocks,
        cached_blocks=counters.cached_blocks,
        used_blocks=counters.used_blocks,
        reserved_blocks=max(0, promised_blocks - counters.used_blocks),
        running=counters.running,
        waiting=counters.waiting,
        pending_prefill_tokens=counters.pending_prefill_tokens,
        decode_context_tokens=counters.decode_context_tokens,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        last_applied_seq=last_applied_seq,
        credit_blocks=max(0, counters.free_blocks + counters.cached_blocks),
        draining=draining,
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
    )


def ended(rid: int, request: EndedRequest) -> pb.Ended:
    return pb.Ended(
        rid=rid,
        error_reason=request.cause.value if request.cause else "",
        error_message=request.message,
        reason=int(request.reason),  # type: ignore[arg-type]
        queue_s=request.queue_s,
        cached_tokens=request.cached_tokens,
        recomputed_tokens=request.recomputed_tokens,
        preemptions=request.preemptions,
    )


def logprobs(entries: Iterable[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    return [
        inference_pb2.TokenLogprobs(
            logprob=entry.logprob,
            rank=entry.rank,
            top_ids=entry.top_ids,
            top_logprobs=entry.top_logprobs,
        )
        for entry in entries
    ]


@dataclass(slots=True)
class StepColumns:
    """The rows of one link in one step. ``logprobs`` is by row, ``prompt_logprobs`` by rid."""

    rids: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def to_step(self, step: int) -> pb.Step:
        message = pb.Step(
            step=step,
            rids=self.rids,
            choices=self.choices,
            start_indices=self.starts,
            num_ids=[1] * len(self.ids),
            ids=self.ids,
        )
        for row, entry in self.logprobs.items():
            message.logprobs.add(
                rid=self.rids[row],
                choice=self.choices[row],
                start_index=self.starts[row],
                tokens=logprobs([entry]),
            )
        for rid, entries in self.prompt_logprobs.items():
            message.logprobs.add(rid=rid, prompt_tokens=logprobs(entries))
        return message


def kv_events(
    link: RouterLink, events: Iterable[tuple[bool, bytes]], *, cleared: bool = False
) -> pb.KvEvents:
    """Changes of the prefix cache, numbered for this link."""
    link.kv_seq += 1
    message = pb.KvEvents(seq=link.kv_seq, cleared=cleared)
    for stored, block_hash in events:
        number = int.from_bytes(block_hash[:8], "big")
        (message.stored if stored else message.removed).append(number)
    return message
