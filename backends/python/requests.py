"""`pb_utils.InferenceRequest`: a request as a model sees it, and one that a model makes for other models."""

from __future__ import annotations

import enum
import json
import threading
from typing import TYPE_CHECKING, Final, NoReturn

from backends.python.failures import TritonModelException, check_parameters, incompatible
from backends.python.responses import ResponseSender
from backends.python.server_calls import not_supported
from backends.python.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from backends.python.instance import PythonInstance
    from backends.python.responses import InferenceResponse
    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError

#: Whether a request is answered by what `execute` returns or by a sender is decided under this lock, by one step.
#: One for all requests: held for a moment, by few. A finalizer of the model's may run within that moment.
_ending = threading.RLock()

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2


class MemoryType(enum.IntEnum):
    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """Where a model would like the outputs of a request that it makes."""

    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType) or not isinstance(preferred_device_id, int):
            signature = "PreferredMemory(preferred_memory_type: MemoryType, preferred_device_id: int = 0)"
            raise incompatible("__init__", signature, preferred_memory_type, preferred_device_id)
        self._memory_type = preferred_memory_type
        self._device_id = preferred_device_id


class InferenceTrace:
    """The trace that a request belongs to."""

    __slots__ = ("_context",)

    def __init__(self, context: str | None = None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        """Return the OpenTelemetry context as JSON, or None where the request is not traced so."""
        return self._context


class InferenceRequest:
    """A request. Those that `execute` gets come from `received`, others from the constructor."""

    __slots__ = (
        "_answered",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_instance",
        "_on_dropped",
        "_parameters",
        "_parameters_json",
        "_preferred_memory",
        "_request",
        "_request_id",
        "_requested_output_names",
        "_sender",
        "_timeout_us",
        "_trace",
    )

    _parameters: Mapping[str, str | int | bool | float]
    #: The parameters as JSON, made when the model asks for them.
    _parameters_json: str | None
    _inputs: list[Tensor]
    #: None until the model asks.
    _requested_output_names: Set[str] | None
    _trace: InferenceTrace | None
    _preferred_memory: PreferredMemory | None
    #: None for a request that the model made.
    _request: WorkerRequest | None
    #: The two below are set where there is a `_request`, and are what senders need.
    _instance: PythonInstance
    _on_dropped: Callable[[WorkerRequest, bool], None]
    #: None until the model asks for it, or `execute` has returned without an answer: most requests need none.
    _sender: ResponseSender | None
    #: Whether the request was answered, or closed, without its sender. A sender that is made later is closed.
    _answered: bool

    def __init__(  # the parameters are those of Triton
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, str | int | bool] | None = None,
    ) -> None:
        """`timeout` is in microseconds, `model_version` -1 the newest one that serves."""
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        if not all(isinstance(tensor, Tensor) for tensor in inputs):
            raise incompatible("__init__", "InferenceRequest(..., inputs: List[Tensor], ...)", inputs)
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._requested_output_names = frozenset(requested_output_names)
        self._flags = flags
        self._timeout_us = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = check_parameters(parameters)
        self._parameters_json = json.dumps(self._parameters)
        self._request = None
        self._sender = None
        self._answered = False

    @staticmethod
    def received(
        requests: Sequence[WorkerRequest], instance: PythonInstance, on_dropped: Callable[[WorkerRequest, bool], None]
    ) -> list[InferenceRequest]:
        """Return the model's views of the requests of a batch. `on_dropped`: see `ResponseSender`."""
        views: list[InferenceRequest] = []
        for request in requests:
            ref = request.ref
            view = InferenceRequest.__new__(InferenceRequest)
            view._request_id = ref.id
            view._correlation_id = ref.correlation_id
            view._inputs = Tensor.received(request.inputs, instance.writable_inputs)
            view._requested_output_names = None
            view._flags = ref.flags
            view._timeout_us = ref.timeout_us
            view._preferred_memory = None
            view._trace = None
            view._parameters = ref.parameters
            view._parameters_json = None
            view._request = request
            view._instance = instance
            view._on_dropped = on_dropped
            view._sender = None
            view._answered = False
            views.append(view)
        return views

    def inputs(self) -> list[Tensor]:
        """Return the input tensors, the same objects each time."""
        return list(self._inputs)

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the sequence's id, 0 for a request outside of sequences."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the TRITONSERVER_REQUEST_FLAG_SEQUENCE_* bits."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """Return the request's time-out in microseconds, 0 for none."""
        return self._timeout_us

    def parameters(self) -> str:
        """Return the request's parameters as JSON."""
        if self._parameters_json is None:
            self._parameters_json = json.dumps(self._parameters, separators=(",", ":"), ensure_ascii=False)
        return self._parameters_json

    def requested_output_names(self) -> set[str]:
        """Return which outputs the client asked for; all of the configuration where it named none."""
        names = self._requested_output_names
        if names is None:
            assert self._request is not None, "only those that came from a client have not been told"
            asked = self._request.ref.outputs
            names = self._instance.output_names if not asked else frozenset(output.name for output in asked)
            self._requested_output_names = names
        return set(names)

    def trace(self) -> InferenceTrace:
        if self._trace is None:
            self._trace = InferenceTrace()
        return self._trace

    def get_response_sender(self) -> ResponseSender | None:
        """Return the request's sender, the same object each time; None for a request that the model made."""
        return None if self._request is None else self._get_sender(self._request)

    def _get_sender(self, request: WorkerRequest) -> ResponseSender:
        with _ending:
            if self._sender is None:
                self._sender = ResponseSender(request, self._instance, self._on_dropped, closed=self._answered)
            return self._sender

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        return self._request is not None and self._request.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Say what happens to the request after `execute`: only TRITONSERVER_REQUEST_RELEASE_ALL so far."""
        if flags & TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise not_supported("rescheduling a request (TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)")

    def answer(self, response: InferenceResponse) -> bool:
        """Send the response that `execute` returned. False where the model had sent the final one itself."""
        assert self._request is not None
        with _ending:
            sender = self._sender
            self._answered = True
        if sender is not None:
            return sender.answer(response)
        response.send_to(self._request, self._instance, True)
        return True

    def fail(self, error: ServingError) -> None:
        """End the request with `error` unless it has ended."""
        assert self._request is not None
        self._get_sender(self._request).fail(error)

    def close(self) -> None:
        """Refuse further responses: the worker answers the request."""
        with _ending:
            sender = self._sender
            self._answered = True
        if sender is not None:
            sender.close()

    def outlive_execute(self) -> None:
        """The model may answer later: from now on it is noticed when it drops the request without an answer."""
        assert self._request is not None
        self._get_sender(self._request)

    def exec(self, decoupled: bool = False) -> NoReturn:
        raise not_supported("a request to another model (InferenceRequest.exec)")

    def async_exec(self, decoupled: bool = False) -> NoReturn:
        raise not_supported("a request to another model (InferenceRequest.async_exec)")


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the request's input called `name`, or None."""
    for tensor in inference_request._inputs:  # asked for each input of each request: no calls in here
        if tensor._name == name:
            return tensor
    return None
