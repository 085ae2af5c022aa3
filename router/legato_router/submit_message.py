"""The Submit that carries a request, and what was delivered of it so far, to a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from legato.v1 import inference_pb2 as pb, worker_pb2

from .choice_relay import ChoiceRelay
from .validated import PreparedRequest

MIN_TIMEOUT_S = 0.001
"""A deadline that has just passed; 0 would mean none."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the router has decided about a request before it is placed. ``deadline_s``: seconds
    from its arrival."""

    request_key: str
    tenant: str
    traceparent: str
    seed: int
    resume_token: bytes
    affinity: bytes
    deadline_s: float | None


def to_submit(
    prepared: PreparedRequest,
    ticket: Ticket,
    choices: Sequence[ChoiceRelay],
    *,
    attempt: int,
    timeout_s: float | None,
    initial_credit: int,
) -> worker_pb2.Submit:
    """``timeout_s``: time left, None = no deadline. ``rid`` and ``seq`` are the link's to fill."""
    request, sampling = prepared.request, prepared.request.sampling
    resumes = any(choice.ids for choice in choices)
    submit = worker_pb2.Submit(
        attempt=attempt,
        prompt_ids=prepared.prompt_ids,
        num_prompt_tokens=len(prepared.prompt_ids),
        max_tokens=prepared.max_tokens,
        n=request.n,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=[
                pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias
            ],
            allowed_token_ids=sampling.allowed_token_ids,
            bad_token_ids=sampling.bad_token_ids,
            seed=ticket.seed,
        ),
        stop_token_ids=request.stop.token_ids,
        min_tokens=request.stop.min_tokens,
        ignore_eos=request.stop.ignore_eos,
        logprobs=request.logprobs,
        prompt_logprobs=None if resumes else request.prompt_logprobs,
        request_class=int(request.request_class),  # type: ignore[arg-type]
        timeout_s=0.0 if timeout_s is None else max(MIN_TIMEOUT_S, timeout_s),
        tenant=ticket.tenant,
        cache_salt=request.cache_salt.encode(),
        initial_credit=initial_credit,
        traceparent=ticket.traceparent,
        blocks_needed=prepared.blocks_needed,
    )
    if resumes:
        submit.resume.extend(
            worker_pb2.ResumedChoice(choice=choice.choice, ids=choice.ids, finished=choice.ended)
            for choice in choices
        )
    return submit
