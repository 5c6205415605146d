"""Responses of a model: `InferenceResponse`, `TritonError`, and `ResponseSender`.

A request has at most one `ResponseSender`, which knows the responses that were sent. So the request gets exactly one
final response, also if `execute` returns a response for it.

Ends the requests that a model dropped without a final response, so that no client waits forever.

The garbage collector finds them, and may do so inside any other code; so a separate thread ends them. Triton does not
end such requests. The same thread takes the responses of calls whose iterators were dropped.
"""

from __future__ import annotations

import contextlib
import enum
import json
import queue
import threading
from typing import TYPE_CHECKING, Final, cast

from backends.python.conversions import as_text
from backends.python.failures import TritonModelException, check_parameters, incompatible_arguments
from backends.python.tensors import Tensor, select_outputs
from kernel.errors import ErrorCode, InternalError, ServingError, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from backends.python.instance import PythonInstance
    from backends.worker.model_calls import ModelCall, ModelCalls
    from backends.worker.request import WorkerRequest

TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1


class TritonErrorCode(enum.IntEnum):
    """The numbers of TRITONSERVER_Error_Code. `kernel.errors.ErrorCode` has the same names."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    __str__ = enum.Enum.__str__  # as Triton's enumerations show themselves


TritonErrorCode.__name__ = "__ErrorCode"


class TritonError:
    """An error for one request. It is not an exception, but a part of an `InferenceResponse`."""

    __slots__ = ("_code", "_message")

    UNKNOWN = TritonErrorCode.UNKNOWN
    INTERNAL = TritonErrorCode.INTERNAL
    NOT_FOUND = TritonErrorCode.NOT_FOUND
    INVALID_ARG = TritonErrorCode.INVALID_ARG
    UNAVAILABLE = TritonErrorCode.UNAVAILABLE
    UNSUPPORTED = TritonErrorCode.UNSUPPORTED
    ALREADY_EXISTS = TritonErrorCode.ALREADY_EXISTS
    CANCELLED = TritonErrorCode.CANCELLED

    def __init__(self, message: str, code: TritonErrorCode = TritonErrorCode.INTERNAL) -> None:
        text = as_text(message)
        if text is None or not isinstance(code, TritonErrorCode):
            signature = "TritonError(message: str, code: TritonError.__ErrorCode = <__ErrorCode.INTERNAL: 1>)"
            raise incompatible_arguments("__init__", signature, message, code)
        self._message = text
        self._code = code

    def message(self) -> str:
        """Return the text that the client gets."""
        return self._message

    def code(self) -> TritonErrorCode:
        """Return the code, from which the HTTP or gRPC status follows."""
        return self._code

    def as_serving_error(self) -> ServingError:
        """Return the error as the server sends it."""
        return error_of(ErrorCode[self._code.name], self._message)


class InferenceResponse:
    """One response: tensors or an error. If it has both, the client gets the error."""

    __slots__ = ("_error", "_output_tensors", "_parameters")

    _parameters: Mapping[str, str | int | bool]

    def __init__(
        self,
        output_tensors: list[Tensor] | tuple[Tensor, ...] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, str | int | bool] | None = None,
    ) -> None:
        """The list `output_tensors` is copied. Values of `parameters` may be bool, int and str.

        Raises TypeError for wrong types, and `TritonModelException` for None among the tensors (Triton).
        """
        fits = isinstance(output_tensors, (list, tuple)) and (error is None or isinstance(error, TritonError))
        if fits:
            for tensor in output_tensors:
                if not isinstance(tensor, Tensor):
                    fits = False
        if not fits:
            if isinstance(output_tensors, (list, tuple)) and None in output_tensors:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            signature = (
                "InferenceResponse(output_tensors: List[Tensor] = [], error: TritonError = None, "
                "parameters: object = None)"
            )
            raise incompatible_arguments("__init__", signature, output_tensors, error, parameters)
        self._output_tensors = list(output_tensors)
        self._error = error
        self._parameters = {} if parameters is None else check_parameters(parameters)

    @staticmethod
    def received(tensors: list[Tensor], parameters: Mapping[str, str | int | bool | float]) -> InferenceResponse:
        """Return a response of another model, with the parameters that it has: also float."""
        response = InferenceResponse.__new__(InferenceResponse)
        response._output_tensors = tensors
        response._error = None
        response._parameters = cast("Mapping[str, str | int | bool]", parameters)
        return response

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors, the same objects each time."""
        return list(self._output_tensors)

    def has_error(self) -> bool:
        """Return whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters)

    def send_to(self, request: WorkerRequest, instance: PythonInstance, final: bool) -> None:
        """Send this response to `request`, without the outputs that the client did not request."""
        if self._error is not None:
            request.fail(self._error.as_serving_error(), final=final)
            return
        outputs = select_outputs(self._output_tensors, request.ref.outputs, instance.output_names)
        if not instance.usual_outputs:
            outputs = instance.prepare_outputs(self._output_tensors, outputs)
        request.responder.respond(request, outputs, self._parameters, final)


class ResponseSender:
    """Sends the responses of one request, from any thread. Models get it from `get_response_sender()`.

    It is `closed` from the start if the request already has its final response.

    If the model drops the sender and its request without a final response, the sender calls `on_dropped` with the
    request, and with True if only the final flag is missing. The garbage collector may run this call, so `on_dropped`
    must not use locks.
    """

    __slots__ = ("_closed", "_instance", "_lock", "_on_dropped", "_request", "_sent_count")

    def __init__(
        self,
        request: WorkerRequest,
        instance: PythonInstance,
        on_dropped: Callable[[WorkerRequest, bool], None],
        *,
        closed: bool,
    ) -> None:
        self._request = request
        self._instance = instance
        self._on_dropped = on_dropped
        self._sent_count = 0
        self._closed = closed
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if not self._closed:
            # Without decoupling there is one response; if it was sent, only the final flag is missing.
            self._on_dropped(self._request, self._sent_count > 0 and not self._instance.decoupled)

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send `response`. With the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL it is the last one.

        The final flag may also be sent without a response. The arrays of the response may be changed after the call.
        A decoupled model waits here while it is too far ahead of its client. Raises `TritonModelException` in the
        cases in which Triton does.
        """
        fits = response is None or isinstance(response, InferenceResponse)
        if not fits or not isinstance(flags, int):
            signature = "(self: InferenceResponseSender, response: InferenceResponse = None, flags: int = 0) -> None"
            raise incompatible_arguments("send", signature, self, response, flags)
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None and not final:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        with self._lock:
            self._check_allowed(response)
            if response is None:
                self._request.finish()
            else:
                response.send_to(self._request, self._instance, final)
                self._sent_count += 1
            # Set after sending: if sending fails, the request is still open.
            self._closed = final

    def _check_allowed(self, response: InferenceResponse | None) -> None:
        if not self._instance.decoupled:
            if response is not None and self._sent_count:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and not self._sent_count:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        if self._closed or self._request.finished:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request or disconnected."""
        return self._request.is_cancelled()

    def send_returned(self, response: InferenceResponse) -> bool:
        """Send the response that `execute` returned. Returns False if the final one has already been sent."""
        with self._lock:
            if self._closed:
                return False
            if self._sent_count:
                self._request.fail(
                    InternalError("Unable to send response. Non-decoupled model cannot send more than one response.")
                )
            else:
                response.send_to(self._request, self._instance, True)
            self._closed = True
            return True

    def fail(self, error: ServingError) -> None:
        """End the request with `error`, unless it has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._request.fail(error)

    def close(self) -> None:
        """Refuse further responses of the model, because the worker ends the request."""
        with self._lock:
            self._closed = True


# As it is called in texts of Triton.
ResponseSender.__name__ = "InferenceResponseSender"


class DroppedRequests:
    """Ends dropped requests in a thread, from `start` to `stop`. A model that is not used needs no thread."""

    def __init__(self, instance_name: str, calls: ModelCalls, log: Callable[[str, str], None]) -> None:
        """`log` writes a line with a level to the server's log; it may be called by any thread."""
        self._calls = calls
        self._log = log
        self._error = InternalError(
            f"Python model '{instance_name}' dropped the request without sending a final response"
        )
        # SimpleQueue.put may be called by a finalizer that interrupts another put.
        self._queue: queue.SimpleQueue[tuple[WorkerRequest, bool] | ModelCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread, unless it runs. From any thread, before there is anything that can be dropped."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._end_all, name="dropped requests", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the requests that were added, then the thread."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def add(self, request: WorkerRequest, complete: bool) -> None:
        """Let the thread end `request`. `complete`: only the final flag is missing. Uses no lock."""
        self._queue.put((request, complete))

    def call_discarder(self) -> Callable[[ModelCall], None]:
        """Start the thread and return `add_call`."""
        self.start()
        return self.add_call

    def add_call(self, call: ModelCall) -> None:
        """Let the thread take the responses of a call, which nobody takes any more. Uses no lock."""
        self._queue.put(call)

    def _end_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            # The worker may have ended the request meanwhile, or lost its connection to the kernel.
            with contextlib.suppress(ServingError, OSError):
                if isinstance(entry, tuple):
                    request, complete = entry
                    self._end(request, complete=complete)
                else:
                    self._calls.discard(entry)

    def _end(self, request: WorkerRequest, *, complete: bool) -> None:
        if request.finished:
            return
        if complete:
            request.finish()
        else:
            if not request.is_cancelled():  # else the model may drop it, and nobody waits for a response
                self._log("ERROR", self._error.message)
            request.fail(self._error)
