"""From a Submit to a Request: what is resolved, and what is refused (the rest goes over the wire in
tests/integration/test_worker_gate.py)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from legato.errors import LegatoError, Reason
from legato.v1 import inference_pb2, worker_pb2 as pb
from legato_worker.core.request import Request, RequestClass
from legato_worker.runners.base import RunnerSpec
from legato_worker.submission import to_request

from tests.raw_link import submit

SPEC = RunnerSpec(1000, 512, 16, 64, 8, (0, 2))


def request(message: pb.Submit) -> Request:
    return to_request(message, message.prompt_ids, key=7, spec=SPEC, fingerprint="f", now=100.0)


def test_everything_is_resolved() -> None:
    got = request(
        submit(
            ids=range(1, 40),
            ignore_eos=False,
            stop_token_ids=[9],
            timeout_s=2.5,
            tenant="t",
            logprobs=0,
            sampling=inference_pb2.Sampling(seed=2**63, top_k=10**7, top_p=0.5),
        )
    )
    assert got.key == 7 and got.prompt_ids == tuple(range(1, 40))
    assert got.stop_token_ids == {0, 2, 9}
    assert (got.arrival_s, got.deadline_s) == (100.0, 102.5)
    assert got.request_class is RequestClass.STANDARD
    assert (got.sampling.seed, got.sampling.top_k, got.sampling.top_p) == (2**63, 0, 0.5)
    assert got.sampling.logprobs == 0 and got.sampling.prompt_logprobs is None
    assert len(got.block_hashes) == 2


def test_no_timeout_is_no_deadline_and_eos_can_be_ignored() -> None:
    got = request(submit(ignore_eos=True, timeout_s=0.0, initial_credit=2**32 - 1))
    assert got.deadline_s is None and got.stop_token_ids == frozenset()
    assert got.credit == 1 << 31


def test_prefixes_are_shared_only_with_the_same_tenant_salt_and_weights() -> None:
    """B067, B068: no two different sets of parts give the same root."""
    ids = range(1, 40)
    roots = {
        request(submit(ids=ids, tenant=tenant, cache_salt=salt)).cache_root
        for tenant, salt in (("", b""), ("a", b""), ("", b"a"), ("a", b"a"), ("ab", b""))
    }
    assert len(roots) == 5
    message = submit(ids=ids)
    other = to_request(message, message.prompt_ids, key=1, spec=SPEC, fingerprint="g", now=0)
    assert other.cache_root not in roots


def test_resumed_choices_keep_their_places() -> None:
    message = submit(max_tokens=5, n=3)
    message.resume.add(choice=2, ids=[5, 6])
    message.resume.add(choice=0, ids=[1], finished=True)
    got = request(message)
    assert [(choice.ids, choice.finished) for choice in got.resume] == [
        ((1,), True),
        ((), False),
        ((5, 6), False),
    ]


@pytest.mark.parametrize("value", [4, 99, -1])
def test_an_unknown_class_is_refused_and_is_no_crash(value: int) -> None:
    message = submit()
    message.request_class = value  # type: ignore[assignment]
    with pytest.raises(LegatoError) as caught:
        request(message)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, "request_class")


FIELD = st.sampled_from(
    [field.name for field in pb.Submit.DESCRIPTOR.fields if not field.is_repeated]
)


@given(
    st.dictionaries(FIELD, st.one_of(st.integers(0, 2**32 - 1), st.floats()), max_size=6),
    st.lists(st.integers(0, 2**32 - 1), max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_whatever_arrives_is_a_request_or_a_typed_refusal(
    fields: dict[str, Any], ids: list[int]
) -> None:
    """No other exception: that would end the link, and all requests on it."""
    message = submit(ids=ids)
    for name, value in fields.items():
        try:
            setattr(message, name, value)
        except (TypeError, ValueError, AttributeError):
            continue
    try:
        got = request(message)
    except LegatoError as error:
        assert error.reason in (Reason.INVALID_ARGUMENT, Reason.NEVER_FITS)
    else:
        assert 0 < len(got.prompt_ids) < SPEC.max_model_len
        assert all(0 <= i < SPEC.vocab_size for i in got.prompt_ids)
