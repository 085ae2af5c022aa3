"""Every reason with which Legato refuses or ends a request, and its gRPC status, in one table.

A reason is stable and machine-readable (``google.rpc.ErrorInfo.reason``, domain ``legato``); the
message is for people and may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "legato"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"


class Reason(StrEnum):
    """Why a request was refused or ended."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"  # a field is out of its stated range
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"  # Explain: not a recent request of this router
    NEVER_FITS = "NEVER_FITS"  # larger than a whole worker's KV cache
    RESUME_INVALID = "RESUME_INVALID"  # token forged, or of another model or request
    KV_CAPACITY = "KV_CAPACITY"
    TTFT_OBJECTIVE = "TTFT_OBJECTIVE"
    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    TENANT_TOKENS = "TENANT_TOKENS"
    SLOW_READER = "SLOW_READER"  # took no tokens for too long
    QUARANTINED = "QUARANTINED"  # was running on workers that died
    NO_WORKER = "NO_WORKER"
    DRAINING = "DRAINING"
    WORKER_LOST = "WORKER_LOST"  # mid-answer, and no other could continue it
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"


STATUS: Mapping[Reason, grpc.StatusCode] = {
    Reason.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.REQUEST_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.NEVER_FITS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RESUME_INVALID: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.KV_CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TTFT_OBJECTIVE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_TIMEOUT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TENANT_TOKENS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.SLOW_READER: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUARANTINED: grpc.StatusCode.ABORTED,
    Reason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.WORKER_LOST: grpc.StatusCode.ABORTED,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


@dataclass
class LegatoError(Exception):
    """A typed refusal or failure, the same on client, router and worker.

    ``field`` names the offending request field (INVALID_ARGUMENT). ``metadata`` holds the limit and
    the observed value. ``retry_after_s``: None = a retry makes no sense without a change.
    """

    reason: Reason
    message: str
    field: str = ""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    retry_after_s: float | None = None

    def __str__(self) -> str:
        where = f" ({self.field})" if self.field else ""
        return f"{self.reason.value}{where}: {self.message}"

    @property
    def code(self) -> grpc.StatusCode:
        return STATUS[self.reason]


def invalid(field: str, message: str, **metadata: object) -> LegatoError:
    """INVALID_ARGUMENT for ``field``; ``metadata`` tells the limit and the observed value."""
    return LegatoError(
        Reason.INVALID_ARGUMENT, message, field, {k: str(v) for k, v in metadata.items()}
    )


def to_status(error: LegatoError) -> status_pb2.Status:
    """The google.rpc.Status of an error, with ErrorInfo, BadRequest and RetryInfo details."""
    details: list[any_pb2.Any] = [
        _pack(
            error_details_pb2.ErrorInfo(
                reason=error.reason.value, domain=DOMAIN, metadata=dict(error.metadata)
            )
        )
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    code: tuple[int, str] = error.code.value
    return status_pb2.Status(code=code[0], message=str(error), details=details)


def trailing_metadata(error: LegatoError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailers for ``context.abort``: the details, and the pushback that gRPC's own client retry
    obeys (-1 = do not retry)."""
    pushback = -1 if error.retry_after_s is None else round(error.retry_after_s * 1000)
    return (
        (DETAILS_KEY, to_status(error).SerializeToString()),
        (PUSHBACK_KEY, str(pushback)),
    )


def from_rpc_error(error: grpc.aio.AioRpcError) -> LegatoError:
    """The typed error behind a failed call. Statuses that did not come from Legato (a refused
    connection, a proxy) are mapped by their code."""
    trailers = dict(error.trailing_metadata() or ())
    raw = trailers.get(DETAILS_KEY)
    if isinstance(raw, bytes):
        status = status_pb2.Status.FromString(raw)
        return _from_status(status)
    details = error.details() or ""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return LegatoError(Reason.INVALID_ARGUMENT, details, "message")  # gRPC's own size limit
    by_code = {
        grpc.StatusCode.UNAVAILABLE: Reason.NO_WORKER,
        grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED: Reason.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND: Reason.MODEL_NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.QUEUE_FULL,
    }
    return LegatoError(by_code.get(error.code(), Reason.INTERNAL), details)


def _from_status(status: status_pb2.Status) -> LegatoError:
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after: float | None = None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after = retry.retry_delay.ToMilliseconds() / 1000
    field_name = bad.field_violations[0].field if bad.field_violations else ""
    message = bad.field_violations[0].description if bad.field_violations else status.message
    reason = Reason(info.reason) if info.reason in Reason.__members__ else Reason.INTERNAL
    prefix = f"{reason.value}: "
    return LegatoError(
        reason, message.removeprefix(prefix), field_name, dict(info.metadata), retry_after
    )


def _pack(message: error_details_pb2.ErrorInfo | object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed
