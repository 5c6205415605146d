"""A request as a backend gets it: its inputs as buffers, and methods to respond."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from backends.transport import wire
    from backends.worker.reports import ReportCollector
    from kernel.observe.limited_log import LimitedLog
    from shm.arrays import Array
    from shm.tensor import Tensor


class OutputValue(msgspec.Struct):
    """One output: `name` as in the model's configuration, and an `array` with the batch dimension, if there is one.

    `datatype` is a name of the protocol, such as FP32. BYTES are object arrays of `bytes`; BF16, which NumPy lacks, is
    an array of uint16. An array that is not in C order is copied. On a GPU it may be a `DeviceArray`.
    """

    name: str
    datatype: str
    array: Any


class Responder(Protocol):
    """Sends the responses of requests. Callable from any thread."""

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None: ...

    def respond(self, request: WorkerRequest, outputs: Sequence[OutputValue],
                parameters: Mapping[str, str | int | bool], final: bool) -> None: ...  # fmt: skip

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None: ...

    def finish(self, request: WorkerRequest) -> None: ...

    def reschedule(self, request: WorkerRequest) -> None: ...

    def is_cancelled(self, request: WorkerRequest) -> bool: ...

    def is_ahead(self, request: WorkerRequest) -> bool: ...

    def when_taken(self, request: WorkerRequest, callback: Callable[[], object]) -> None: ...
    @property
    def reports(self) -> ReportCollector: ...


class WorkerRequest(msgspec.Struct, eq=False):
    """A request of a batch. It gets exactly one final response, by `respond`, `fail` or `finish`, unless it is given
    back by `reschedule`."""

    #: The message from the kernel: id, flags, correlation id, priority, timeout and parameters.
    ref: wire.RequestMessage
    #: Each with its bytes in `data`: bytes of the message, or a view of shared memory. A read-only view is of a
    #: client's memory, see `in_memory_of_client`.
    inputs: list[Tensor]
    #: Sends the responses.
    responder: Responder
    finished: bool = False
    response_count: int = 0
    #: Arrays and tensors of `reserve`, by output name. Only the responder uses it.
    reserved: dict[str, tuple[Any, Tensor]] = {}
    #: The thread of an event loop, in which `respond` does not wait for the client (up to a limit); 0 for none.
    loop_thread: int = 0
    #: Whether `report` was called.
    reported: bool = False

    @property
    def id(self) -> str:
        """The id that the client gave the request; empty without one."""
        return self.ref.id

    def input(self, name: str) -> Tensor | None:
        """Return the input called `name`, or None if the request does not have it."""
        for view in self.inputs:
            if view.name == name:
                return view
        return None

    def wants(self, name: str) -> bool:
        """Whether the client requested this output: by name, or by naming no output."""
        for output in self.ref.outputs:
            if output.name == name:
                return True
        return not self.ref.outputs

    def reserve(self, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        """Return a C-ordered array in the output's final place, for the model to write the output to.

        `respond` with this array copies nothing. Returns None if there is no such place (BYTES, classification, a
        small tensor that is inline, a region that is too small): then give `respond` any array.
        """
        return self.responder.reserve(self, name, datatype, shape)

    def respond(
        self,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool] | None = None,
        *,
        final: bool = True,
    ) -> None:
        """Send a response. Outputs that the client did not request are left out.

        When this returns, the arrays may be changed or freed, but not inputs of the request. Blocks while a decoupled
        model has sent too many responses that the client has not taken.
        """
        self.responder.respond(self, outputs, parameters or {}, final)

    def fail(self, error: ServingError, *, final: bool = True) -> None:
        """Send `error` as a response."""
        self.responder.fail(self, error, final)

    def finish(self) -> None:
        """End the responses without another one (decoupled models)."""
        self.responder.finish(self)

    def reschedule(self) -> None:
        """Give the request back: it is executed again later (iterative sequences). Call it in `execute` only."""
        self.responder.reschedule(self)

    def is_cancelled(self) -> bool:
        """Whether the client has disconnected. Cheap enough to call in a loop."""
        return self.responder.is_cancelled(self)

    def is_ahead(self) -> bool:
        """Whether the next `respond` would wait, because the client has too many responses left to take."""
        return self.responder.is_ahead(self)

    def when_taken(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, from any thread, when the request `is_ahead` no more. It replaces an earlier one."""
        self.responder.when_taken(self, callback)

    # ---- reports: what the statistics show instead of what the worker measures -----------------------

    def report(
        self, start_ns: int, inputs_ready_ns: int, inferred_ns: int, end_ns: int, *, success: bool = True
    ) -> None:
        """Report when the stages of this request began and ended, in monotonic nanoseconds.

        Its queue, input, inference and output times in the statistics are these. Without `success` it counts as
        failed, whatever its response is; with an error as response it counts as failed in any case. Call it within
        `execute`, or before the final response if that is later.
        """
        self.responder.reports.request(self, (start_ns, inputs_ready_ns, inferred_ns, end_ns), success=success)

    def report_response(
        self, index: int, start_ns: int, inferred_ns: int | None, end_ns: int, error: ServingError | None = None
    ) -> None:
        """Report one of the request's responses, which count from 0, for `response_stats` of the statistics.

        Its inference has ended at `inferred_ns`; None for a response that was not sent, because it is empty. Responses
        beyond the first 1024 of a request are not counted.
        """
        self.responder.reports.response(self, index, start_ns, inferred_ns, end_ns, error)

    def report_activity(self, name: str, ns: int | None = None) -> None:
        """Add a point to the request's trace, now or at `ns` (monotonic nanoseconds); nothing if it is not traced.

        Names that end in `_START` and `_END` make a span. Raises `InternalError` for an empty or very long name.
        """
        self.responder.reports.activity(self, name, ns)


def failure_of(error: Exception, log: LimitedLog) -> ServingError:
    """Return the error that requests get for an exception of the backend.

    A `ServingError` is that error. Any other exception is written to the log, and becomes an `InternalError`.
    """
    if isinstance(error, ServingError):
        return error.with_traceback(None)  # the traceback refers to the inputs
    log.log("the model", "the model failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


def fail_unfinished(requests: Iterable[WorkerRequest], failure: ServingError | None) -> None:
    """Fail the requests of a batch that have no final response; without a `failure`, the backend has sent none."""
    for request in requests:
        if not request.finished:
            request.fail(failure or InternalError("the backend did not respond to the request"))


def in_memory_of_client(tensor: Tensor) -> bool:
    """Whether an input is in a client's memory, which the client may change and the model must not."""
    return type(tensor.data) is memoryview and tensor.data.readonly
