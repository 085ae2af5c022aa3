"""The signed token with which an answer goes on through another router after a broken connection.

It carries what the first router decided (seed, max_tokens) and a digest of what the client must
send again unchanged (prompt, sampling, stop, n), so that the routers need no shared store and a
client can neither alter the one nor exchange the other. It holds no prompt text.

Layout: version, seed, max_tokens, n, SHA-256 of model fingerprint, SHA-256 of the request,
HMAC-SHA256 over all before it; big-endian.
"""

from __future__ import annotations

import dataclasses
import hmac
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from legato.errors import LegatoError, Reason
from legato.sampling_rules import Sampling

from .validated import Stop, ValidatedRequest

VERSION = 1
MIN_KEY_BYTES = 16

_PAYLOAD = struct.Struct(">BQII32s32s")
_MAC_BYTES = sha256().digest_size


@dataclass(frozen=True, slots=True)
class ResumeClaims:
    """What the router that admitted the request decided."""

    seed: int
    max_tokens: int


def sign(
    claims: ResumeClaims,
    request: ValidatedRequest,
    prompt_ids: Sequence[int],
    *,
    fingerprint: str,
    key: bytes,
) -> bytes:
    """The token for an admitted request. ``key`` is the same on all routers, and secret."""
    payload = _PAYLOAD.pack(
        VERSION,
        claims.seed,
        claims.max_tokens,
        request.n,
        sha256(fingerprint.encode()).digest(),
        _request_digest(request, prompt_ids),
    )
    return payload + _mac(payload, key)


def verify(
    request: ValidatedRequest, prompt_ids: Sequence[int], *, fingerprint: str, key: bytes
) -> ValidatedRequest:
    """The request to continue, with the seed and max_tokens that its answer began with.

    ``request.resume`` is set. Raises RESUME_INVALID when its token was not made with ``key``, or
    for another model or request. The signature is compared in constant time, and first.
    """
    token = request.resume.token if request.resume else b""
    payload, mac = token[:-_MAC_BYTES], token[-_MAC_BYTES:]
    if len(payload) != _PAYLOAD.size or not hmac.compare_digest(mac, _mac(payload, key)):
        raise _refused("not a token of this service")
    version, seed, max_tokens, n, model, digest = _PAYLOAD.unpack(payload)
    if version != VERSION:
        raise _refused(f"version {version} is not known here")
    if model != sha256(fingerprint.encode()).digest():
        raise _refused("the answer was made by another model")
    same = n == request.n and digest == _request_digest(request, prompt_ids)
    if not (
        same and request.sampling.seed in (None, seed) and request.max_tokens in (None, max_tokens)
    ):
        raise _refused("prompt, sampling, stop, n or max_tokens differ from the first call's")
    sampling = dataclasses.replace(request.sampling, seed=seed)
    return dataclasses.replace(request, sampling=sampling, max_tokens=max_tokens)


def _request_digest(request: ValidatedRequest, prompt_ids: Sequence[int]) -> bytes:
    digest = sha256()
    # Settings at their defaults are left out, so that a release with a new one still accepts the
    # tokens of the release before. The seed is told by the token itself.
    sampling = dataclasses.replace(request.sampling, seed=None)
    for settings, default in ((sampling, Sampling()), (request.stop, Stop())):
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if value != getattr(default, field.name):
                part = f"{type(settings).__name__}.{field.name}={value!r}".encode()
                digest.update(struct.pack(">I", len(part)) + part)
    ids = array("I", prompt_ids)
    digest.update(struct.pack(">I", 0) + ids.tobytes())
    return digest.digest()


def _mac(payload: bytes, key: bytes) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"the resume key must have at least {MIN_KEY_BYTES} bytes")
    return hmac.digest(key, payload, "sha256")


def _refused(message: str) -> LegatoError:
    return LegatoError(Reason.RESUME_INVALID, message, "resume.resume_token")
