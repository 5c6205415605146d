"""The one table of error codes: what each becomes over HTTP and gRPC.

As in Triton (`HttpCodeFromError` in http_server.cc, `CodeToStatus` in grpc/grpc_utils.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpclib.const import Status

from kernel.errors import DeadlineTooNear, ErrorCode, NoMemory, QueueFull, QuotaExceeded

if TYPE_CHECKING:
    from kernel.errors import ServingError

#: The status of a request that the quota of its client refused (RFC 6585).
TOO_MANY_REQUESTS = 429

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
}

GRPC_STATUS: dict[ErrorCode, Status] = {
    ErrorCode.UNKNOWN: Status.UNKNOWN,
    ErrorCode.INTERNAL: Status.INTERNAL,
    ErrorCode.NOT_FOUND: Status.NOT_FOUND,
    ErrorCode.INVALID_ARG: Status.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: Status.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: Status.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    ErrorCode.CANCELLED: Status.CANCELLED,
}


def http_status(error: ServingError) -> int:
    """Return the status of a response with `error`: the status of its code, except for what Triton does not have."""
    return TOO_MANY_REQUESTS if isinstance(error, QuotaExceeded) else HTTP_STATUS[error.code]


def grpc_status(error: ServingError) -> Status:
    """Return the status of a call that fails with `error`: the status of its code, except for exhausted resources."""
    return Status.RESOURCE_EXHAUSTED if isinstance(error, (NoMemory, QuotaExceeded)) else GRPC_STATUS[error.code]


def may_retry(error: ServingError) -> bool:
    """Whether the client should send the request again, a moment later."""
    return isinstance(error, (QuotaExceeded, QueueFull, DeadlineTooNear)) or (
        isinstance(error, NoMemory) and error.retry_later
    )
