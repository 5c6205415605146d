"""All errors that a client or an operator can see; their base class is `ServingError`.

A `ServingError` is an expected failure with one of Triton's codes. Any other exception is a bug, and its response
has the code INTERNAL. Errors never mention HTTP or gRPC: `protocols/status.py` maps the codes. The texts are
Triton's if Triton has one.
"""

from __future__ import annotations

import enum
import errno
from typing import TYPE_CHECKING, ClassVar

from kernel.texts import MAX_TEXT_BYTE_SIZE, SERVER_PATHS, limited, printable

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable


class ErrorCode(enum.Enum):
    """Triton's eight codes (TRITONSERVER_ERROR_*). Each has a class, which says what it means."""

    #: `UnknownError`
    UNKNOWN = "unknown"
    #: `InternalError`
    INTERNAL = "internal"
    #: `NotFound`
    NOT_FOUND = "not_found"
    #: `InvalidArgument`
    INVALID_ARG = "invalid_arg"
    #: `Unavailable`
    UNAVAILABLE = "unavailable"
    #: `Unsupported`
    UNSUPPORTED = "unsupported"
    #: `AlreadyExists`
    ALREADY_EXISTS = "already_exists"
    #: `RequestCancelled`
    CANCELLED = "cancelled"

    @property
    def title(self) -> str:
        """The words that Triton prints before the reason of a failed load, such as `Invalid argument`."""
        return _TITLES[self]


_TITLES = {
    ErrorCode.UNKNOWN: "Unknown",
    ErrorCode.INTERNAL: "Internal",
    ErrorCode.NOT_FOUND: "Not found",
    ErrorCode.INVALID_ARG: "Invalid argument",
    ErrorCode.UNAVAILABLE: "Unavailable",
    ErrorCode.UNSUPPORTED: "Unsupported",
    ErrorCode.ALREADY_EXISTS: "Already exists",
    ErrorCode.CANCELLED: "<invalid code>",  # as Triton prints it
}


#: The most bytes of a text that a model made and a client gets.
MAX_MODEL_TEXT = 64 << 10

#: A longer message is cut before paths of the server are looked for in it: what clients send may have megabytes.
_MAX_SEARCHED = 4 * MAX_MODEL_TEXT


class BadOption(Exception):
    """The server or a command cannot start with these options. The message is one line for the operator."""


class ServingError(Exception):
    """An expected failure. `code` is its kind, `message` is the text for the client."""

    #: What kind of failure it is.
    code: ClassVar[ErrorCode] = ErrorCode.UNKNOWN

    #: Whether Triton finds this out before it queues the request. Its HTTP server sends such errors as JSON, and
    #: those of later phases as plain text. A request that `Kernel.submit` refuses was never queued, whatever this says.
    before_queueing: bool = False

    #: The most bytes of the message that clients get. Most errors repeat what the client has sent, which can be long.
    max_byte_size: int = MAX_TEXT_BYTE_SIZE

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def text(self) -> str:
        """The message as front doors send it: without paths of the server, cut, and with line feeds and tabs as its
        only control characters."""
        message, limit = self.message, self.max_byte_size
        if len(message) > _MAX_SEARCHED:
            message = limited(message, limit)
        return printable(limited(SERVER_PATHS.hidden_in(message), limit), keep="\n\t")


class UnknownError(ServingError):
    """What has failed is not known, or has no other code."""

    code = ErrorCode.UNKNOWN


class InternalError(ServingError):
    """The server or the model has failed: an equal request may fail again. An exception of a model has this code."""

    code = ErrorCode.INTERNAL


class NotFound(ServingError):
    """What the client has named does not exist: a model, a version, a region."""

    code = ErrorCode.NOT_FOUND


class InvalidArgument(ServingError):
    """The request is wrong, whatever the state of the server is. The text says what was expected."""

    code = ErrorCode.INVALID_ARG


class Unavailable(ServingError):
    """Not now: the model is not ready, a queue or the memory is full, the server stops. Clients may try again."""

    code = ErrorCode.UNAVAILABLE


class Unsupported(ServingError):
    """The request is correct, and this model or server cannot do it."""

    code = ErrorCode.UNSUPPORTED


class AlreadyExists(ServingError):
    """What the client wants to make exists already."""

    code = ErrorCode.ALREADY_EXISTS


class RequestCancelled(ServingError):
    """The client has cancelled the request, or has disconnected. `message` is empty, as in Triton."""

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
    """Return an error with `code` and `message`."""
    return _BY_CODE[code](message)


def worker_error(code: ErrorCode, message: str) -> ServingError:
    """Return the error that a worker sent as code and text. The text is the model's, such as a traceback."""
    error = error_of(code, message)
    error.max_byte_size = MAX_MODEL_TEXT
    return error


def prefixed(prefix: str, error: ServingError) -> ServingError:
    """Return `error` with `prefix` before its message, as an error of a request that was queued."""
    found = ServingError.__new__(type(error) if isinstance(error, NoMemory) else _BY_CODE[error.code])
    Exception.__init__(found, prefix + error.message)
    found.message = prefix + error.message
    found.max_byte_size = error.max_byte_size
    found.before_queueing = False
    return found


def file_error(message: str, cause: OSError) -> ServingError:
    """Return the error for a file or process that `cause` made unusable."""
    return NoDescriptorLeft() if lacks_descriptors(cause) else InternalError(message)


def lacks_descriptors(error: BaseException) -> bool:
    """Whether `error` means that the process, or the whole system, has no file descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class NoDescriptorLeft(Unavailable):
    """The server could not open a file, a socket or an arena. Some other client may close a connection soon."""

    def __init__(self) -> None:
        super().__init__("the server has no file descriptor left; try again later")


# ---- models ---------------------------------------------------------------------------------


class ModelNotFound(NotFound):
    """The model, or this version of it, does not exist."""

    def __init__(self, name: str, version: str = "") -> None:
        shown = f"'{name}' version {version}" if version else f"'{name}'"
        super().__init__(f"Request for unknown model: {shown} is not found")


class NoAvailableVersion(NotFound):
    """The model exists, but no version of it is ready."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Request for unknown model: '{name}' has no available versions")


class ModelNotReady(Unavailable):
    """The requested version is loading, was unloaded, or failed to load."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(f"Request for unknown model: '{name}' version {version} is not at ready state")


class ModelLoadFailed(InvalidArgument):
    """A load request failed. The message contains the reasons of all failed versions."""

    max_byte_size = MAX_MODEL_TEXT


class BadConfig(InvalidArgument):
    """A model configuration breaks a rule."""


class ServedElsewhere(Unavailable):
    """A front door in a process of its own does not know the model: the kernel's process serves the connection.

    A client sees the text only if its model was unloaded while the body of its request came.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"Request for unknown model: '{name}' is not at ready state")


# ---- requests -------------------------------------------------------------------------------


def request_prefix(request_id: str) -> str:
    """Return Triton's prefix of an error about one request."""
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


class QuotaExceeded(Unavailable):
    """The client has as many requests queued or in flight as it may have (`naiad.quota`)."""

    before_queueing = True

    def __init__(self, request_id: str, quota: int) -> None:
        super().__init__(
            request_prefix(request_id)
            + f"this client already has {quota} requests queued or in flight, which is its quota; try again later"
        )


class QueueTimeout(Unavailable):
    def __init__(self) -> None:
        super().__init__("Request timeout expired")


class SequenceTimeout(QueueTimeout):
    """A request of a sequence that waited for a slot was not executed within its timeout."""

    def __init__(self) -> None:
        Unavailable.__init__(self, "timeout of the corresponding sequence has been expired")


class SequenceLost(Unavailable):
    """The sequence has ended because the worker that had it was lost."""

    def __init__(self, instance: str) -> None:
        super().__init__(
            f"the sequence has ended: the worker of model instance '{instance}', which had it, was lost. A new "
            "sequence can begin with a request that has the START flag"
        )


class WorkerLost(Unavailable):
    """The worker died while it had the request. The request is not retried.

    `when` says how far the worker was with the request.
    """

    def __init__(self, instance: str, cause: str, when: str = "while it executed the request") -> None:
        super().__init__(
            f"the worker of model instance '{instance}' was lost {when} ({cause}); the request was not retried"
        )
        self.instance = instance
        self.cause = cause


class PoisonRequest(InvalidArgument):
    """The same request has ended workers of the model before (`naiad.isolate_poison`)."""

    before_queueing = True

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the same request has ended workers of model '{model}' before, and is refused until the model is loaded "
            "again or the refusals are cleared (parameter naiad.isolate_poison)"
        )


class DeadlineTooNear(Unavailable):
    """The queue is so long that the request would not be executed before its client gives up."""

    before_queueing = True

    def __init__(self, model: str, wait_ms: float, left_ms: float) -> None:
        super().__init__(
            f"model '{model}' has requests for about {wait_ms:.0f} ms, and the deadline of this one is in "
            f"{left_ms:.0f} ms; try again later"
        )


class NoInstanceInTime(Unavailable):
    """The worker of the model was lost, and no other was there within the timeout of the request."""

    def __init__(self, model: str, timeout_us: int) -> None:
        super().__init__(
            f"no instance of model '{model}' is alive: its worker was lost and is started again, which takes longer "
            f"than the request's timeout of {timeout_us} microseconds"
        )


class ExecutionTimeout(Unavailable):
    """The model did not finish the request within the time that an execution may take. The request is not retried."""

    def __init__(self, model: str, busy_s: float, limit_s: float, setting: str) -> None:
        super().__init__(
            f"model '{model}' was still executing the request after {busy_s:.1f} s; its limit is {limit_s:g} s "
            f"({setting}). Its worker was ended, and the request was not retried"
        )


class ResponsesNotRead(Unavailable):
    """The client has not read responses of a decoupled model for too long, while other requests waited."""

    def __init__(self, model: str, limit_s: float) -> None:
        super().__init__(
            f"responses of model '{model}' were not read for {limit_s:g} s (--response-wait-timeout): the request was "
            "cancelled"
        )


class NotFinishedInTime(Unavailable):
    """The version or the instance was unloaded or replaced, and did not finish the request in time."""

    def __init__(self, title: str, limit_s: float) -> None:
        super().__init__(
            f"{title} was unloaded or replaced, and the request was not finished within {limit_s:g} s "
            "(--model-unload-timeout-secs)"
        )


class DecoupledOverUnary(Unsupported):
    """A decoupled model was called through `entry_point`, a call that can have only one response."""

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


class NoMemory(Unavailable):
    """The request needs more memory than there is for it."""

    #: Whether there may be enough memory later.
    retry_later = False


class ArenaFull(NoMemory):
    """There is no free memory of this size within the limits. The request fails; it does not wait."""

    retry_later = True

    def __init__(self, byte_size: int, what: str = "tensor", exceeded: str = "") -> None:
        """`exceeded` is the flag, with its value, of a limit below `byte_size`: there will never be room."""
        if exceeded:
            self.retry_later = False
            super().__init__(
                f"a {what} of {byte_size} bytes is larger than all memory that there is for it ({exceeded})"
            )
        else:
            super().__init__(f"no memory left for a {what} of {byte_size} bytes; try again later")


class MemoryFull(NoMemory):
    """Tensors that clients have not read or models have not used take all memory that the server may use."""

    before_queueing = True
    retry_later = True

    def __init__(self) -> None:
        super().__init__("no memory left: tensors of other requests take all of it; try again later")


# ---- code of others -------------------------------------------------------------------------


class failing_as:
    """Code of others runs in this block and may raise anything. The block then raises the error that `made` returns.

    For plug-ins, models, files that run code, and libraries without a class for their errors. What was raised is the
    cause of the error. Errors of the class `passes` are raised unchanged. An interrupt and the end of a task, which are
    not an `Exception`, are raised unchanged as well.
    """

    __slots__ = ("_made", "_passes")

    def __init__(self, made: Callable[[Exception], Exception], *, passes: type[Exception] | tuple[()] = ()) -> None:
        self._made, self._passes = made, passes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, self._passes):
            raise self._made(error) from error


class failure_logged:
    """One of several independent steps. An `Exception` ends only this step, and is logged.

    The log has `text` with `arguments`, and the traceback.
    """

    __slots__ = ("_arguments", "_logger", "_text")

    def __init__(self, logger: logging.Logger, text: str, *arguments: object) -> None:
        self._logger, self._text, self._arguments = logger, text, arguments

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._logger.error(self._text, *self._arguments, exc_info=error, stacklevel=2)
        return True
