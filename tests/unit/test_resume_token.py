"""The resume token: what it lets through unchanged, and all that it refuses."""

from __future__ import annotations

import dataclasses

import pytest
from legato.errors import LegatoError, Reason
from legato.sampling_rules import Sampling
from legato_router import resume_token
from legato_router.resume_token import ResumeClaims, sign, verify
from legato_router.validated import IdsPrompt, Objective, Resume, Stop, ValidatedRequest

KEY = b"k" * 32
FINGERPRINT = "model-a"
IDS = (5, 6, 7)
CLAIMS = ResumeClaims(seed=2**64 - 1, max_tokens=99)
REQUEST = ValidatedRequest(
    model="m",
    prompt=IdsPrompt(IDS),
    n=2,
    sampling=Sampling(temperature=0.75, logit_bias=((1, 2.0),)),
    stop=Stop(strings=("x",), min_tokens=1),
)


def resumed(token: bytes, request: ValidatedRequest = REQUEST) -> ValidatedRequest:
    return dataclasses.replace(request, resume=Resume(token, ((8,), ())))


def signed(request: ValidatedRequest = REQUEST) -> bytes:
    return sign(CLAIMS, request, IDS, fingerprint=FINGERPRINT, key=KEY)


def check(
    request: ValidatedRequest,
    ids: tuple[int, ...] = IDS,
    *,
    fingerprint: str = FINGERPRINT,
    key: bytes = KEY,
) -> ValidatedRequest:
    return verify(request, ids, fingerprint=fingerprint, key=key)


def assert_refused(
    request: ValidatedRequest,
    ids: tuple[int, ...] = IDS,
    *,
    fingerprint: str = FINGERPRINT,
    key: bytes = KEY,
) -> None:
    with pytest.raises(LegatoError) as caught:
        check(request, ids, fingerprint=fingerprint, key=key)
    assert caught.value.reason is Reason.RESUME_INVALID
    assert caught.value.retry_after_s is None


def test_an_answer_goes_on_with_its_seed_and_max_tokens() -> None:
    checked = check(resumed(signed()))
    assert (checked.sampling.seed, checked.max_tokens) == (2**64 - 1, 99)
    assert checked.resume is not None
    assert (
        dataclasses.replace(
            checked,
            sampling=dataclasses.replace(checked.sampling, seed=None),
            max_tokens=None,
            resume=None,
        )
        == REQUEST
    )


def test_a_token_is_small_and_holds_no_prompt() -> None:
    assert len(signed()) == 113
    long = sign(CLAIMS, REQUEST, tuple(range(10_000)), fingerprint=FINGERPRINT, key=KEY)
    assert len(long) == 113


def test_every_altered_byte_is_noticed() -> None:
    token = signed()
    for index in range(len(token)):
        altered = bytearray(token)
        altered[index] ^= 1
        assert_refused(resumed(bytes(altered)))


@pytest.mark.parametrize("token", [b"", b"x", bytes(113), bytes(1024)])
def test_what_is_no_token_is_refused(token: bytes) -> None:
    assert_refused(resumed(token))
    assert_refused(resumed(signed()[:-1]))
    assert_refused(resumed(signed() + b"x"))


def test_another_key_model_or_prompt_is_refused() -> None:
    request = resumed(signed())
    assert_refused(request, key=b"j" * 32)
    assert_refused(request, fingerprint="model-b")
    assert_refused(request, (5, 6))
    assert_refused(request, (5, 6, 8))
    assert_refused(request, (5, 6, 7, 0))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Sampling)])
def test_changed_sampling_is_refused(field: str) -> None:
    """Every field, so that one added later is covered with no edit here."""
    value = getattr(Sampling(), field)
    other: object = 3 if value is None or isinstance(value, int) else 0.25
    if isinstance(value, tuple):
        other = ((1, 0.5),) if field == "logit_bias" else (1,)
    changed = dataclasses.replace(REQUEST.sampling, **{field: other})  # type: ignore[arg-type]
    assert_refused(resumed(signed(), dataclasses.replace(REQUEST, sampling=changed)))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Stop)])
def test_changed_stops_are_refused(field: str) -> None:
    others = {"strings": ("y",), "token_ids": (4,), "min_tokens": 0}
    changed = dataclasses.replace(REQUEST.stop, **{field: others.get(field, True)})  # type: ignore[arg-type]
    assert_refused(resumed(signed(), dataclasses.replace(REQUEST, stop=changed)))


def test_n_and_max_tokens_must_agree_and_may_be_named_again() -> None:
    token = signed()
    assert_refused(resumed(token, dataclasses.replace(REQUEST, n=3)))
    assert_refused(resumed(token, dataclasses.replace(REQUEST, max_tokens=98)))
    assert check(resumed(token, dataclasses.replace(REQUEST, max_tokens=99))).max_tokens == 99
    seeded = dataclasses.replace(
        REQUEST, sampling=dataclasses.replace(REQUEST.sampling, seed=CLAIMS.seed)
    )
    assert check(resumed(token, seeded)).sampling.seed == CLAIMS.seed


def test_what_does_not_change_the_answer_may_differ() -> None:
    """Another deadline, other credit: a second call has its own."""
    other = dataclasses.replace(
        REQUEST,
        logprobs=3,
        objective=Objective(deadline_s=1),
        request_id="second",
        initial_credit=5,
        session="s",
    )
    assert check(resumed(signed(), other)).request_id == "second"


def test_strings_cannot_be_moved_between_fields() -> None:
    """Parts are length-prefixed: two stop strings are not one with a comma."""
    one = dataclasses.replace(REQUEST, stop=Stop(strings=("a', 'b",)))
    two = dataclasses.replace(REQUEST, stop=Stop(strings=("a", "b")))
    assert_refused(resumed(signed(one), two))


def test_a_setting_at_its_default_is_not_part_of_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a release that knows one more setting accepts tokens of the release before."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Newer(Stop):
        new_setting: bool = False

    Newer.__name__ = "Stop"
    token = signed()
    monkeypatch.setattr(resume_token, "Stop", Newer)
    fields = {f.name: getattr(REQUEST.stop, f.name) for f in dataclasses.fields(Stop)}
    check(resumed(token, dataclasses.replace(REQUEST, stop=Newer(**fields))))
    assert_refused(
        resumed(token, dataclasses.replace(REQUEST, stop=Newer(**fields, new_setting=True)))
    )


def test_a_short_key_is_a_mistake_of_the_operator() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        sign(CLAIMS, REQUEST, IDS, fingerprint=FINGERPRINT, key=b"short")
