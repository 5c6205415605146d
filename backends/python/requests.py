"""`pb_utils.InferenceRequest`: a request that a model receives, or one that it creates for another model.

What a model gives to `InferenceRequest` beside tensors: flags, the memory that it prefers, a trace.
"""

from __future__ import annotations

import asyncio
import enum
import json
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from backends.python.calls import execute, execute_async
from backends.python.conversions import as_int64, as_text, as_texts, as_uint32, as_uint64
from backends.python.failures import NO_CAST, TritonModelException, check_parameters, incompatible_arguments, is_truth
from backends.python.responses import ResponseSender
from backends.python.tensors import Tensor
from backends.worker.model_calls import CallRequest
from kernel.errors import InvalidArgument
from kernel.records.trace_context import context_as_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence, Set

    from backends.python.calls import ResponseIterator
    from backends.python.instance import PythonInstance
    from backends.python.responses import InferenceResponse
    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1

TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2

TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1

TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2


class MemoryType(enum.IntEnum):
    """Where tensors are."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1

    __str__ = enum.Enum.__str__  # as Triton's enumerations show themselves


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU

TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """The memory that a model prefers for the outputs of a request that it creates."""

    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        device_id = as_int64(preferred_device_id)
        if device_id is None or not isinstance(preferred_memory_type, MemoryType):
            signature = (
                "PreferredMemory(preferred_memory_type: triton::backend::python::PreferredMemory::MemoryType, "
                "preferred_device_id: int = 0)"
            )
            raise incompatible_arguments("__init__", signature, preferred_memory_type, preferred_device_id)
        self._memory_type = preferred_memory_type
        self._device_id = device_id

    @property
    def device_id(self) -> int | None:
        """The GPU; None for memory of the host."""
        return self._device_id if self._memory_type is MemoryType.TRITONSERVER_MEMORY_GPU else None


class InferenceTrace:
    """The trace of a request."""

    __slots__ = ("_context", "request_number")

    def __init__(self, context: str | None = None) -> None:
        self._context = context
        #: The number of the request that has the trace; 0 for a trace that the model has made.
        self.request_number = 0

    def get_context(self) -> str | None:
        """Return the OpenTelemetry context as JSON, or None if the request has none."""
        return self._context


def is_list_of(kinds: tuple[type, ...], values: object) -> bool:
    """Return whether `values` is a list or tuple of nothing but instances of `kinds`."""
    if not isinstance(values, (list, tuple)):
        return False
    for value in values:  # noqa: SIM110 - `all` with a generator takes four times as long, and calls are many
        if not isinstance(value, kinds):
            return False
    return True


#: `types.NoneType`, which Python 3.9 does not have: workers may run on it.
NoneType = type(None)

#: Under this lock it is decided whether a request gets its response from `execute` or from its sender. One lock for all
#: requests is enough, because it is held very briefly. It is reentrant, because a finalizer of the model may run then.
_sender_lock = threading.RLock()

#: The default of arguments that must be given, although others with a default stand before them. Any: the type checker
#: of a model's author shows the type of the argument.
_REQUIRED: Any = None

_SIGNATURE = (
    "InferenceRequest(request_id: str = '', correlation_id: object = 0, "
    "inputs: List[triton::backend::python::PbTensor], "
    "requested_output_names: List[str], model_name: str, model_version: int = -1, flags: int = 0, timeout: int = 0, "
    "preferred_memory: PreferredMemory, trace: InferenceTrace, parameters: object = None)"
)


#: The defaults of arguments for which Triton refuses None.
_ANY_MEMORY = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)

_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """A request. `received` creates the requests for `execute`; a model creates its own with the constructor."""

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
        "_instance",
        "_model_name",
        "_model_version",
        "_on_dropped",
        "_parameters",
        "_parameters_json",
        "_preferred_memory",
        "_request",
        "_request_id",
        "_requested_output_names",
        "_reschedules",
        "_responded",
        "_sender",
        "_timeout_us",
        "_trace",
        "reschedules",
    )

    _parameters: Mapping[str, str | int | bool | float]
    #: The parameters as JSON; None before the first `parameters()`.
    _parameters_json: str | None
    _inputs: list[Tensor]
    #: None before the first `requested_output_names()`.
    _requested_output_names: Set[str] | None
    #: Only of a request that the model created. The version is -1 for the newest one that serves.
    _model_name: str
    _model_version: int
    _trace: InferenceTrace | None
    _preferred_memory: PreferredMemory | None
    #: None for a request that the model created.
    _request: WorkerRequest | None
    #: Arguments for the sender; set only if there is a `_request`.
    _instance: PythonInstance
    _on_dropped: Callable[[WorkerRequest, bool], None]
    #: None before `get_response_sender()` and `keep_open`; most requests need no sender.
    _sender: ResponseSender | None
    #: The request was ended without its sender. A sender that is created later is closed.
    _responded: bool
    #: The model wants to execute the request again.
    reschedules: bool

    def __init__(  # Triton's parameters
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = _REQUIRED,
        requested_output_names: Sequence[str] = _REQUIRED,
        model_name: str = _REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _ANY_MEMORY,
        trace: InferenceTrace = _NO_TRACE,
        parameters: Mapping[str, str | int | bool] | None = None,
    ) -> None:
        """`inputs`, `requested_output_names` and `model_name` must be given, as keywords or after the others.

        `timeout` is in microseconds. `model_version` -1 means the newest version that serves. Raises TypeError for
        wrong types, and `TritonModelException` for None among the inputs and for a correlation id of another type
        (Triton).
        """
        id, name = as_text(request_id), as_text(model_name)
        version, flag_bits, timeout_us = as_int64(model_version), as_uint32(flags), as_uint64(timeout)
        names = as_texts(requested_output_names)
        if (
            id is None
            or name is None
            or version is None
            or flag_bits is None
            or timeout_us is None
            or names is None
            or not is_list_of((Tensor, NoneType), inputs)
            or correlation_id is None
            or not isinstance(trace, InferenceTrace)
            or not isinstance(preferred_memory, PreferredMemory)
        ):
            raise incompatible_arguments(
                "__init__", _SIGNATURE, request_id, correlation_id, inputs, requested_output_names, model_name,
                model_version, flags, timeout, preferred_memory, trace, parameters,
            )  # fmt: skip
        _check_correlation_id(correlation_id)
        if None in inputs or "" in names:
            empty = "Input tensor" if None in inputs else "Requested output name"
            raise TritonModelException(
                f"{empty} for request with id '{id}' and model name '{name}' should not be empty."
            )
        self._model_name = name
        self._model_version = version
        self._request_id = id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._requested_output_names = frozenset(names)
        self._flags = flag_bits
        self._timeout_us = timeout_us
        self._preferred_memory = None if preferred_memory is _ANY_MEMORY else preferred_memory
        self._trace = None if trace is _NO_TRACE else trace
        self._parameters = check_parameters(parameters)
        self._parameters_json = self._request = self._sender = None
        self._responded = self.reschedules = False

    @staticmethod
    def received(
        requests: Sequence[WorkerRequest], instance: PythonInstance, on_dropped: Callable[[WorkerRequest, bool], None]
    ) -> list[InferenceRequest]:
        """Return the requests of a batch for the model. `on_dropped`: see `ResponseSender`."""
        views: list[InferenceRequest] = []
        for request in requests:
            ref = request.ref
            view = InferenceRequest.__new__(InferenceRequest)
            view._request_id = ref.id
            view._correlation_id = ref.correlation_id
            view._inputs = instance.received(request.inputs, instance.writable_inputs)
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
            view._responded = view.reschedules = False
            views.append(view)
        return views

    def inputs(self) -> list[Tensor]:
        """Return the input tensors, the same objects each time."""
        return list(self._inputs)

    def request_id(self) -> str:
        """Return the id that the client gave the request; empty if it gave none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the id of the sequence; 0 for a request without sequence."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the TRITONSERVER_REQUEST_FLAG_SEQUENCE_* bits."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the TRITONSERVER_REQUEST_FLAG_SEQUENCE_* bits of a request that the model creates."""
        bits = as_uint32(flags)
        if bits is None:
            signature = "(self: InferenceRequest, arg0: int) -> None"
            raise incompatible_arguments("set_flags", signature, self, flags)
        self._flags = bits

    def timeout(self) -> int:
        """Return the request's timeout in microseconds; 0 for none."""
        return self._timeout_us

    def parameters(self) -> str:
        """Return the request's parameters as JSON."""
        if self._parameters_json is None:
            if self._request is None:
                self._parameters_json = json.dumps(self._parameters)
            else:
                self._parameters_json = json.dumps(self._parameters, separators=(",", ":"), ensure_ascii=False)
        return self._parameters_json

    def requested_output_names(self) -> set[str]:
        """Return the outputs that the client requested, or all configured outputs if it named none."""
        return set(self._output_names())

    def _output_names(self) -> Set[str]:
        names = self._requested_output_names
        if names is None:
            assert self._request is not None, "a request that the model created has its names from the constructor"
            refs = self._request.ref.outputs
            names = self._instance.output_names if not refs else frozenset(output.name for output in refs)
            self._requested_output_names = names
        return names

    def trace(self) -> InferenceTrace:
        """Return the request's trace, for requests that the model makes while it executes this one."""
        if self._trace is None:
            given = None if self._request is None else self._request.ref.trace
            context = None if given is None else context_as_json(given.traceparent, given.tracestate)
            self._trace = InferenceTrace(context)
            if self._request is not None:
                self._trace.request_number = self._request.ref.number
        return self._trace

    @property
    def worker_request(self) -> WorkerRequest:
        """The request that the worker received. Not of a request that the model created."""
        assert self._request is not None
        return self._request

    def get_response_sender(self) -> ResponseSender | None:
        """Return the request's sender, the same object each time; None for a request that the model created."""
        return None if self._request is None else self._get_sender(self._request)

    def _get_sender(self, request: WorkerRequest) -> ResponseSender:
        with _sender_lock:
            if self._sender is None:
                self._sender = ResponseSender(request, self._instance, self._on_dropped, closed=self._responded)
            return self._sender

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request or disconnected."""
        return self._request is not None and self._request.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Set what happens to the request after `execute`.

        With TRITONSERVER_REQUEST_RELEASE_RESCHEDULE it is executed again, if the model has iterative sequences; then
        `execute` returns None for it.
        """
        bits = as_uint32(flags)
        if bits is None:
            signature = "(self: InferenceRequest, arg0: int) -> None"
            raise incompatible_arguments("set_release_flags", signature, self, flags)
        self.reschedules = bits == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def reschedule(self) -> None:
        """Give the request back to the server, which executes it again."""
        if not self._instance.iterative:
            self.fail(
                InvalidArgument(
                    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
                    "configured to handle such a flag."
                )
            )
            return
        self.close()
        assert self._request is not None
        if not self._request.finished:
            self._request.reschedule()

    def send_returned(self, response: InferenceResponse) -> bool:
        """Send the response that `execute` returned. Returns False if the final one has already been sent."""
        assert self._request is not None
        with _sender_lock:
            sender = self._sender
            self._responded = True
        if sender is not None:
            return sender.send_returned(response)
        response.send_to(self._request, self._instance, True)
        return True

    def fail(self, error: ServingError) -> None:
        """End the request with `error`, unless it has ended."""
        assert self._request is not None
        self._get_sender(self._request).fail(error)

    def close(self) -> None:
        """Refuse further responses of the model, because the worker ends the request."""
        with _sender_lock:
            sender = self._sender
            self._responded = True
        if sender is not None:
            sender.close()

    def leave_open(self) -> None:
        """`execute` returned no response: give the request back if the model wants to, else let it respond later."""
        if self.reschedules:
            self.reschedule()
        else:
            self.keep_open()

    def keep_open(self) -> None:
        """Let the model respond after `execute`. Creates the sender, which notices when the model drops the request."""
        assert self._request is not None
        self._get_sender(self._request)

    def responding_in(self, loop_thread: int) -> WorkerRequest:
        """Return the worker's request, which does not wait for its client in `loop_thread`."""
        assert self._request is not None
        self._request.loop_thread = loop_thread
        return self._request

    @overload
    def exec(self, decoupled: Literal[False] = False) -> InferenceResponse: ...
    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...
    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Send the request to its model, and wait for the response.

        With `decoupled` return an iterator of the responses; a decoupled model needs it. Errors are in the response.
        Raises `TritonModelException` before the model's `initialize` has returned, and from its `finalize` on.
        """
        return execute(self._call_request(decoupled, "exec"), self._preferred_memory)

    @overload
    def async_exec(self, decoupled: Literal[False] = False) -> Awaitable[InferenceResponse]: ...
    @overload
    def async_exec(self, decoupled: Literal[True]) -> Awaitable[ResponseIterator]: ...
    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """As `exec`, for `await` in a coroutine. The request is sent also if nobody awaits it."""
        loop = asyncio.get_running_loop()
        return loop.create_task(execute_async(self._call_request(decoupled, "async_exec"), self._preferred_memory))

    def _call_request(self, decoupled: bool, call: str) -> CallRequest:
        if not is_truth(decoupled):
            raise incompatible_arguments(
                call, f"{call}(self: InferenceRequest, decoupled: bool = False)", self, decoupled
            )
        trace, received, preferred = self._trace, self._request, self._preferred_memory
        # A request that the model has received goes to the model itself, as in Triton.
        if received is None:
            name, version = self._model_name, self._model_version
        else:
            name, version = self._instance.model_name, self._instance.model_version
        return CallRequest(
            name,
            [tensor.call_input() for tensor in self._inputs],
            "" if version == -1 else str(version),
            tuple(sorted(self._output_names())),  # the order decides which one an error names
            self._request_id,
            self._correlation_id,
            self._flags,
            0,
            self._timeout_us,
            self._parameters,
            bool(decoupled),
            trace_parent=0 if trace is None else trace.request_number,
            on_device=preferred is None or preferred.device_id is not None,
        )


def _check_correlation_id(given: object) -> None:
    if not isinstance(given, (int, str)):
        raise TritonModelException("Correlation ID must be integer or string")
    if isinstance(given, int) and not 0 <= given < 1 << 64:
        raise RuntimeError(NO_CAST)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the request's input called `name`, or None."""
    for tensor in inference_request._inputs:  # models call this for each input: no function calls inside
        if tensor._name == name:
            return tensor
    return None
