"""Every error that a client or an operator can be told about, under one root.

A `ServingError` is an expected outcome with a code of Triton's; anything else that is raised is a
bug and is answered as INTERNAL. Errors never mention HTTP or gRPC: `protocols/status.py` maps codes.
The texts are Triton's wherever Triton has one.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class ErrorCode(enum.Enum):
    """Triton's eight codes (TRITONSERVER_ERROR_*)."""

    UNKNOWN = "unknown"
    INTERNAL = "internal"
    NOT_FOUND = "not_found"
    INVALID_ARG = "invalid_arg"
    UNAVAILABLE = "unavailable"
    UNSUPPORTED = "unsupported"
    ALREADY_EXISTS = "already_exists"
    CANCELLED = "cancelled"

    @property
    def title(self) -> str:
        """The word that Triton prints before a load failure's reason, such as `Invalid argument`."""
        return _TITLES[self]


_TITLES = {
    ErrorCode.UNKNOWN: "Unknown",
    ErrorCode.INTERNAL: "Internal",
    ErrorCode.NOT_FOUND: "Not found",
    ErrorCode.INVALID_ARG: "Invalid argument",
    ErrorCode.UNAVAILABLE: "Unavailable",
    ErrorCode.UNSUPPORTED: "Unsupported",
    ErrorCode.ALREADY_EXISTS: "Already exists",
    ErrorCode.CANCELLED: "<invalid code>",  # Triton has no word for it
}


class ServingError(Exception):
    """An expected failure: `code` says of which kind, `message` is what the client reads."""

    code: ClassVar[ErrorCode] = ErrorCode.UNKNOWN

    #: Whether Triton finds this out before it queues the request. Its HTTP server sends such errors as JSON, and
    #: those of later phases as plain text. A request that `Kernel.submit` refuses was never queued, whatever this says.
    before_queueing: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UnknownError(ServingError):
    code = ErrorCode.UNKNOWN


class InternalError(ServingError):
    code = ErrorCode.INTERNAL


class NotFound(ServingError):
    code = ErrorCode.NOT_FOUND


class InvalidArgument(ServingError):
    code = ErrorCode.INVALID_ARG


class Unavailable(ServingError):
    code = ErrorCode.UNAVAILABLE


class Unsupported(ServingError):
    code = ErrorCode.UNSUPPORTED


class AlreadyExists(ServingError):
    code = ErrorCode.ALREADY_EXISTS


class RequestCancelled(ServingError):
    code = ErrorCode.CANCELLED

    def __init__(self, message: str = "") -> None:  # Triton sends an empty text
        super().__init__(message)


_BY_CODE: dict[ErrorCode, type[ServingError]] = {
    kind.code: kind
    for kind in (
        UnknownError,
        InternalError,
        NotFound,
        InvalidArgument,
        Unavailable,
        Unsupported,
        AlreadyExists,
        RequestCancelled,
    )
}


def error_of(code: ErrorCode, message: str) -> ServingError:
    """Return the plain error of `code`, for errors that come from a worker as a code and a text."""
    return _BY_CODE[code](message)


# ---- models ---------------------------------------------------------------------------------


class ModelNotFound(NotFound):
    """No such model, or no such version of it."""

    def __init__(self, name: str, version: str = "") -> None:
        shown = f"'{name}' version {version}" if version else f"'{name}'"
        super().__init__(f"Request for unknown model: {shown} is not found")


class NoAvailableVersion(NotFound):
    """The model is known, but none of its versions is ready."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Request for unknown model: '{name}' has no available versions")


class ModelNotReady(Unavailable):
    """The version asked for is loading, unloaded or failed."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(f"Request for unknown model: '{name}' version {version} is not at ready state")


class ModelLoadFailed(InvalidArgument):
    """A load call failed; the reason is that of the version or the repository."""


class BadConfig(InvalidArgument):
    """A model configuration breaks a rule."""


# ---- requests -------------------------------------------------------------------------------


def request_prefix(request_id: str) -> str:
    """Return what Triton puts before the text of an error about one request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


class InvalidRequest(InvalidArgument):
    """The request does not fit the configuration of its model."""

    before_queueing = True


class ServerStopping(Unavailable):
    before_queueing = True

    def __init__(self, request_id: str) -> None:
        super().__init__(
            request_prefix(request_id)
            + "Server is stopping, scheduler for model has stopped accepting new inference requests"
        )


class QueueFull(Unavailable):
    before_queueing = True

    def __init__(self, request_id: str) -> None:
        super().__init__(request_prefix(request_id) + "Exceeds maximum queue size")


class QueueTimeout(Unavailable):
    def __init__(self) -> None:
        super().__init__("Request timeout expired")


class WorkerLost(Unavailable):
    """The worker that was executing the request died; the request is not tried again."""

    def __init__(self, instance: str, cause: str) -> None:
        super().__init__(
            f"the worker of model instance '{instance}' was lost while it executed the request "
            f"({cause}); the request was not retried"
        )
        self.instance = instance
        self.cause = cause


class DecoupledOverUnary(Unsupported):
    """A call that can carry one response only, the `entry_point`, asked a decoupled model."""

    def __init__(self, entry_point: str) -> None:
        super().__init__(f"{entry_point} doesn't support models with decoupled transaction policy")


# ---- shared memory --------------------------------------------------------------------------


class RegionNotFound(NotFound):
    def __init__(self, name: str) -> None:
        super().__init__(f"Unable to find shared memory region: '{name}'")


class RegionExists(AlreadyExists):
    def __init__(self, name: str) -> None:
        super().__init__(f"shared memory region '{name}' already in manager")


class ClientSharedMemoryDisabled(Unsupported):
    def __init__(self) -> None:
        super().__init__("Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.")


class ArenaFull(Unavailable):
    """No block of that size is left; the request is refused instead of waiting."""

    def __init__(self, byte_size: int) -> None:
        super().__init__(f"no memory left for a tensor of {byte_size} bytes; try again later")
