"""From a router's Submit to a core Request: the worker's own gate.

The router has checked all of this already. It is checked again, since what arrives here reaches the
device, and a router may be of another version.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from legato.block_hash import cache_root, chain
from legato.capacity import blocks_needed
from legato.errors import LegatoError, Reason, invalid
from legato.sampling_rules import (
    check_count,
    check_ids,
    check_range,
    check_something_left,
    resolve_sampling,
)
from legato.v1 import worker_pb2 as pb

from .core.request import Request, RequestClass, ResumedChoice, SamplingParams
from .runners.base import RunnerSpec

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_CREDIT = 1 << 31


def to_request(
    submit: pb.Submit,
    prompt_ids: Sequence[int],
    *,
    key: int,
    spec: RunnerSpec,
    fingerprint: str,
    now: float,
) -> Request:
    """The request with every field in range. ``now`` is the engine's clock.

    Raises INVALID_ARGUMENT naming the field, or NEVER_FITS with the numbers.
    """
    num_prompt, max_tokens, n = len(prompt_ids), submit.max_tokens, submit.n
    check_range("prompt_ids", num_prompt, 1, spec.max_model_len - 1, "number of prompt tokens")
    if num_prompt != submit.num_prompt_tokens:
        raise invalid(
            "num_prompt_tokens", "differs from the ids sent", observed=submit.num_prompt_tokens
        )
    check_ids("prompt_ids", prompt_ids, spec.vocab_size)
    check_range("max_tokens", max_tokens, 1, spec.max_model_len - num_prompt)
    check_range("n", n, 1, spec.max_num_seqs)
    check_range("min_tokens", submit.min_tokens, 0, max_tokens)
    check_count("stop_token_ids", len(submit.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_ids("stop_token_ids", submit.stop_token_ids, spec.vocab_size)
    for field in ("logprobs", "prompt_logprobs"):
        if submit.HasField(field):
            check_range(field, getattr(submit, field), 0, MAX_TOP_LOGPROBS)
    if not (isfinite(submit.timeout_s) and submit.timeout_s >= 0):
        raise invalid("timeout_s", "must be finite and >= 0", observed=submit.timeout_s)
    needed = blocks_needed(num_prompt, max_tokens, n, spec.block_size)
    if needed > spec.num_blocks:
        raise LegatoError(
            Reason.NEVER_FITS,
            f"prompt of {num_prompt}, max_tokens {max_tokens} and n {n} need {needed} KV blocks; "
            f"this worker has {spec.num_blocks}",
            metadata={"limit": str(spec.num_blocks), "observed": str(needed)},
        )
    stop_ids = set(submit.stop_token_ids)
    if not submit.ignore_eos:
        stop_ids.update(spec.eos_token_ids)
    root = cache_root(fingerprint=fingerprint, tenant=submit.tenant, salt=submit.cache_salt.hex())
    ids = tuple(prompt_ids)
    return Request(
        key=key,
        prompt_ids=ids,
        max_tokens=max_tokens,
        n=n,
        sampling=_sampling(submit, spec, stop_ids),
        stop_token_ids=frozenset(stop_ids),
        min_tokens=submit.min_tokens,
        request_class=_request_class(submit.request_class),
        arrival_s=now,
        deadline_s=now + submit.timeout_s if submit.timeout_s else None,
        block_hashes=chain(root, ids, spec.block_size),
        cache_root=root,
        tenant=submit.tenant,
        credit=min(submit.initial_credit, MAX_CREDIT),
        resume=_resume(submit, spec),
    )


def _request_class(value: int) -> RequestClass:
    try:
        return RequestClass(value or RequestClass.STANDARD)
    except ValueError:
        raise invalid("request_class", "not a known class", observed=value) from None


def _sampling(submit: pb.Submit, spec: RunnerSpec, stop_ids: set[int]) -> SamplingParams:
    checked = resolve_sampling(submit.sampling, spec.vocab_size)
    check_something_left(
        checked,
        ending_ids=stop_ids,
        min_tokens=submit.min_tokens,
        vocab_size=spec.vocab_size,
    )
    if checked.seed is None:
        raise invalid("sampling.seed", "the router must choose the seed")
    return SamplingParams(
        temperature=checked.temperature,
        top_k=checked.top_k,
        top_p=checked.top_p,
        min_p=checked.min_p,
        repetition_penalty=checked.repetition_penalty,
        presence_penalty=checked.presence_penalty,
        frequency_penalty=checked.frequency_penalty,
        logit_bias=checked.logit_bias,
        allowed_token_ids=checked.allowed_token_ids,
        bad_token_ids=checked.bad_token_ids,
        seed=checked.seed,
        logprobs=submit.logprobs if submit.HasField("logprobs") else None,
        prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None,
    )


def _resume(submit: pb.Submit, spec: RunnerSpec) -> tuple[ResumedChoice, ...]:
    if not submit.resume:
        return ()
    choices = [ResumedChoice() for _ in range(submit.n)]
    for held in submit.resume:
        check_range("resume.choice", held.choice, 0, submit.n - 1)
        check_ids("resume.ids", held.ids, spec.vocab_size)
        if not held.finished:
            check_range("resume.ids", len(held.ids), 0, submit.max_tokens - 1, "number of ids")
        choices[held.choice] = ResumedChoice(tuple(held.ids), held.finished)
    return tuple(choices)
