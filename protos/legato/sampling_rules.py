"""How the fields of a request are checked, the same on router and worker.

Each check raises INVALID_ARGUMENT naming the field, its limit and what was sent. Comparisons are
written so that NaN fails them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite

from .errors import invalid
from .v1 import inference_pb2 as pb

MAX_LOGIT_BIAS = 100
MAX_LOGIT_BIASES = 1024
MAX_TOKEN_ID_LIST = 1024


def check_range(field: str, value: int, low: int, high: int, what: str = "value") -> None:
    if not low <= value <= high:
        limit = low if value < low else high
        raise invalid(field, f"the {what} must lie in {low}..{high}", limit=limit, observed=value)


def check_count(field: str, count: int, limit: int) -> None:
    if not count <= limit:
        raise invalid(field, f"at most {limit} entries", limit=limit, observed=count)


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """``vocab_size``: rows of the embedding table, not the length of the tokenizer."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(
            field,
            f"token id {wrong} is not below the vocabulary's {vocab_size}",
            limit=vocab_size - 1,
            observed=wrong,
        )


def checked_id_list(field: str, ids: Sequence[int], limit: int, vocab_size: int) -> tuple[int, ...]:
    """The ids, sorted and named once."""
    check_count(field, len(ids), limit)
    check_ids(field, ids, vocab_size)
    return tuple(sorted(set(ids)))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; meaning and ranges as in inference.proto. ``top_k == 0`` means all.
    Ids are in range, sorted and named once. ``seed``: None = to be chosen by the router."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    seed: int | None = None


def resolve_sampling(sampling: pb.Sampling, vocab_size: int) -> Sampling:
    """The ``sampling`` field of a request, checked, with defaults filled in."""

    def number(
        name: str, default: float, low: float, high: float, *, above_low: bool = False
    ) -> float:
        if not sampling.HasField(name):  # type: ignore[arg-type]
            return default
        value: float = getattr(sampling, name)
        if not (isfinite(value) and low <= value <= high) or (above_low and value == low):
            bounds = f"{'(' if above_low else '['}{low:.3g}, {high:.3g}]"
            raise invalid(f"sampling.{name}", f"must lie in {bounds}", limit=bounds, observed=value)
        return value

    check_count("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    biases: dict[int, float] = {}
    for entry in sampling.logit_bias:
        check_ids("sampling.logit_bias", (entry.token_id,), vocab_size)
        total = biases.get(entry.token_id, 0.0) + entry.bias
        for bias in (entry.bias, total):
            if not (isfinite(bias) and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS):
                raise invalid(
                    "sampling.logit_bias",
                    f"the bias of id {entry.token_id} must lie in "
                    f"-{MAX_LOGIT_BIAS}..{MAX_LOGIT_BIAS}, also when its entries are added up",
                    limit=MAX_LOGIT_BIAS,
                    observed=bias,
                )
        biases[entry.token_id] = total
    top_k = sampling.top_k
    return Sampling(
        temperature=number("temperature", 0.0, 0, 10),
        top_k=0 if top_k >= vocab_size else top_k,
        top_p=number("top_p", 1.0, 0, 1, above_low=True),
        min_p=number("min_p", 0.0, 0, 1),
        # From 0.01 on (as a 32-bit number): dividing by less could leave the range of fp32.
        repetition_penalty=number("repetition_penalty", 1.0, 0.0099999, 10),
        presence_penalty=number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=number("frequency_penalty", 0.0, -2, 2),
        logit_bias=tuple(sorted(biases.items())),
        allowed_token_ids=checked_id_list(
            "sampling.allowed_token_ids", sampling.allowed_token_ids, MAX_TOKEN_ID_LIST, vocab_size
        ),
        bad_token_ids=checked_id_list(
            "sampling.bad_token_ids", sampling.bad_token_ids, MAX_TOKEN_ID_LIST, vocab_size
        ),
        seed=sampling.seed if sampling.HasField("seed") else None,
    )


def check_something_left(
    sampling: Sampling, *, ending_ids: Collection[int], min_tokens: int, vocab_size: int
) -> None:
    """Some id can be generated at each position; before ``min_tokens`` none of ``ending_ids``."""
    banned = {*sampling.bad_token_ids, *(ending_ids if min_tokens else ())}
    allowed = sampling.allowed_token_ids
    if banned.issuperset(allowed) if allowed else len(banned) >= vocab_size:
        raise invalid(
            "sampling.allowed_token_ids" if allowed else "sampling.bad_token_ids",
            "no token is left to generate: all that are allowed are bad_token_ids, or end the "
            "answer before min_tokens",
        )
