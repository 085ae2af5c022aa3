"""The first and the last frame of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from legato.v1 import inference_pb2 as pb, worker_pb2

from .choice_relay import ChoiceRelay
from .submit_message import Ticket
from .validated import PreparedRequest


def admitted(
    prepared: PreparedRequest, ticket: Ticket, accepted: worker_pb2.Accepted, worker: str
) -> pb.ServerFrame:
    return pb.ServerFrame(
        admitted=pb.Admitted(
            request_key=ticket.request_key,
            request_id=prepared.request.request_id,
            worker=worker,
            prompt_tokens=len(prepared.prompt_ids),
            cached_tokens=accepted.cached_tokens,
            estimated_ttft_s=accepted.estimated_ttft_s,
            seed=ticket.seed,
            max_tokens=prepared.max_tokens,
            resume_token=ticket.resume_token,
        )
    )


def finished(
    prepared: PreparedRequest,
    choices: Sequence[ChoiceRelay],
    ended: worker_pb2.Ended,
    *,
    reason: int,
    timings: pb.Timings,
) -> pb.ServerFrame:
    """``timings`` as the router measured them; the worker's part is filled in from ``ended``."""
    timings.worker_queue_s = ended.queue_s
    timings.preemptions = ended.preemptions
    return pb.ServerFrame(
        finished=pb.Finished(
            reason=reason,  # type: ignore[arg-type]
            usage=pb.Usage(
                prompt_tokens=len(prepared.prompt_ids),
                completion_tokens=sum(len(choice.ids) for choice in choices),
                cached_tokens=ended.cached_tokens,
                recomputed_tokens=ended.recomputed_tokens,
            ),
            timings=timings,
        )
    )
