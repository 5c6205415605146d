"""Calls of other models, whose responses come from functions of the test. Implements `ModelCalls`.

Records what a model sends: the responses of its requests, and its log lines.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from backends.worker.custom_metrics import MetricRegistry
from backends.worker.model_calls import CallResponse, ModelCall
from backends.worker.reports import ReportCollector
from kernel.embedding.arrays import input_tensor, output_array
from kernel.errors import InternalError, RequestCancelled, ServingError
from kernel.serving.validation import fits, shape_text
from shm.arrays import to_bytes
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from backends.worker.model_calls import CallRequest, Result
    from backends.worker.request import OutputValue, WorkerRequest
    from kernel.config.spec import ModelSpec
    from shm.arrays import Array


class CallInputs(dict[str, "Array"]):
    """A call of the model under test, for the function of the test that responds to it: input name → array."""

    def __init__(self, request: CallRequest) -> None:
        super().__init__((each.name, output_array(_inline(each))) for each in request.inputs)
        self.model_name = request.model_name
        #: Empty for the newest version.
        self.model_version = request.model_version
        #: Empty for all outputs.
        self.requested_output_names = tuple(request.outputs)
        self.request_id = request.id
        self.correlation_id = request.correlation_id
        self.flags = request.flags
        self.priority = request.priority
        self.timeout_us = request.timeout_us
        self.parameters = dict(request.parameters)
        #: Whether the model accepts several responses: `exec(decoupled=True)`.
        self.decoupled = request.streaming


def _inline(value: OutputValue | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return Tensor(value.name, value.datatype, list(value.array.shape), to_bytes(value.array))


#: Responds to the calls of one model: returns output name → array or list; or, as a decoupled model, an iterable of
#: those, such as a generator. A `ServingError` that it raises is the error that the caller gets.
ModelFunction = Callable[[CallInputs], object]


class FunctionCalls:
    """The calls of one model under test. A function runs in the thread of the model that makes the call."""

    def __init__(self, functions: Mapping[str, ModelFunction]) -> None:
        """`functions`: name of a model → what responds to its calls."""
        self._functions = dict(functions)
        self._numbers = itertools.count(1)
        #: Calls that may have more responses: number → those that the function still makes.
        self._open: dict[int, Iterator[object]] = {}
        #: What the model did with other models: (action, name), where the action is load, unload or ready.
        self.controlled: list[tuple[str, str]] = []

    def start(self, request: CallRequest) -> ModelCall:
        """See `ModelCalls`. Raises `LookupError` if the test has no function for the model."""
        function = self._functions.get(request.model_name)
        if function is None:
            known = ", ".join(sorted(self._functions)) or "none"
            raise LookupError(
                f"the model calls model '{request.model_name}', for which the test has no function; it has: {known}. "
                f"Give one: load_model(..., calls={{'{request.model_name}': function}})"
            )
        call = ModelCall(next(self._numbers), streaming=request.streaming)
        try:
            result = function(CallInputs(request))
            if isinstance(result, Mapping):
                self._end(call, CallResponse(_tensors(result), final=True))
            elif request.streaming:
                self._open[call.number] = iter(_responses(result))
            else:
                self._end(call, _only(list(_responses(result)), request.model_name))
        except ServingError as error:
            self._end(call, CallResponse(error=error, final=True))
        return call

    def _end(self, call: ModelCall, response: CallResponse) -> None:
        call.responses.append(response)
        call.ended = True
        self._open.pop(call.number, None)

    def wait(self, call: ModelCall) -> CallResponse:
        """See `ModelCalls`. The function makes the response now."""
        response = self.take(call)
        if response is None:
            raise InternalError("the call has ended: there is no further response")
        return response

    def take(self, call: ModelCall) -> CallResponse | None:
        if not call.responses and call.number in self._open:
            self._make_next(call)
        return call.responses.popleft() if call.responses else None

    def _make_next(self, call: ModelCall) -> None:
        try:
            result = next(self._open[call.number])
            call.responses.append(CallResponse(_tensors(result)))
        except StopIteration:
            self._end(call, CallResponse(final=True, empty=True))
        except ServingError as error:
            self._end(call, CallResponse(error=error, final=True))

    def notify(self, call: ModelCall, on_response: Callable[[], None]) -> None:
        """See `ModelCalls`. A response is always there."""
        on_response()

    def cancel(self, call: ModelCall) -> None:
        if not call.ended:
            self._end(call, CallResponse(error=RequestCancelled(), final=True))

    def discard(self, call: ModelCall) -> None:
        call.responses.clear()
        self._open.pop(call.number, None)

    def wait_for(self, future: Future[Result]) -> Result:
        return future.result()

    def control(
        self,
        action: str,
        model_name: str,
        *,
        version: str = "",
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        unload_dependents: bool = False,
    ) -> bool:
        """See `ModelCalls`. A model is ready if the test has a function for it."""
        self.controlled.append((action, model_name))
        return model_name in self._functions


def _responses(result: object) -> Iterable[object]:
    """Return the responses of a function that returned no mapping. Raises `TypeError`."""
    if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
        raise TypeError(
            "the function of a called model must return a dict of outputs, or an iterable of such, not "
            f"{type(result).__name__}"
        )
    return result


def _only(results: list[object], model_name: str) -> CallResponse:
    if len(results) != 1:
        raise InternalError(f"model '{model_name}' sent {len(results)} responses to a call that accepts one")
    return CallResponse(_tensors(results[0]), final=True)


def _tensors(outputs: object) -> list[Tensor]:
    """Return the outputs of a response. Raises `TypeError`."""
    if not isinstance(outputs, Mapping):
        raise TypeError(f"a response of a called model is a dict of outputs, not {type(outputs).__name__}")
    return [_tensor(str(name), value) for name, value in outputs.items()]


def _tensor(name: str, value: Any) -> Tensor:
    tensor = input_tensor(name, value, None)
    return Tensor(name, tensor.datatype, tensor.shape, memoryview(bytearray(tensor.data or b"")))


class ModelResponse(dict[str, "Array"]):
    """One response: output name → array. BF16 is float32, and BYTES an object array of `bytes`, as for a client."""

    def __init__(self, outputs: Mapping[str, Array], parameters: Mapping[str, str | int | bool]) -> None:
        super().__init__(outputs)
        #: Parameters that the model set in the response.
        self.parameters = dict(parameters)


class RecordedResponse(msgspec.Struct, frozen=True):
    """One message about a request: a response, an error, or only the end of the responses."""

    response: ModelResponse | None = None
    error: ServingError | None = None
    final: bool = True


class RecordingHost:
    """Takes the responses of all requests of one model, from any thread. Implements `Responder` and `Host`."""

    def __init__(self, functions: Mapping[str, ModelFunction]) -> None:
        """`functions` respond to the calls of the model, see `FunctionCalls`."""
        self.logged: list[tuple[str, str]] = []
        self.calls = FunctionCalls(functions)
        self._spec: ModelSpec | None = None
        self._registry = MetricRegistry(lambda: None, lambda: None)
        #: Nothing that is reported of executions is shown.
        self.reports = ReportCollector(lambda _: None, self.log)
        #: Request number → what has come for it.
        self._arrived: dict[int, queue.SimpleQueue[RecordedResponse]] = {}
        self._cancelled: set[int] = set()
        self._rescheduled: list[WorkerRequest] = []

    # ---- for the model under test ------------------------------------------------------------

    def expect(self, spec: ModelSpec) -> None:
        """Check the outputs of all responses against `spec`."""
        self._spec = spec

    def open(self, request: WorkerRequest) -> None:
        """Take responses of a new request."""
        self._arrived[request.ref.number] = queue.SimpleQueue()

    def next_response(self, request: WorkerRequest, timeout_s: float) -> RecordedResponse:
        """Wait for the next response of `request`. Raises `queue.Empty` after `timeout_s` seconds."""
        return self._arrived[request.ref.number].get(timeout=timeout_s)

    def cancel(self, request: WorkerRequest) -> None:
        self._cancelled.add(request.ref.number)

    def take_rescheduled(self) -> list[WorkerRequest]:
        """Return the requests that the model gave back since the last call."""
        taken, self._rescheduled = self._rescheduled, []
        return taken

    # ---- Responder ---------------------------------------------------------------------------

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        return None

    def respond(
        self,
        request: WorkerRequest,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool],
        final: bool,
    ) -> None:
        try:
            arrays = {output.name: self._array(output) for output in outputs if request.wants(output.name)}
        except ServingError as error:
            self.fail(request, error, final)
            return
        request.response_count += 1
        self._record(request, RecordedResponse(ModelResponse(arrays, parameters), final=final))

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None:
        request.response_count += 1
        self._record(request, RecordedResponse(error=error, final=final))

    def finish(self, request: WorkerRequest) -> None:
        self._record(request, RecordedResponse())

    def reschedule(self, request: WorkerRequest) -> None:
        if request.finished:
            raise InternalError("a request was rescheduled after its final response")
        request.finished = True
        self._rescheduled.append(request)

    def is_cancelled(self, request: WorkerRequest) -> bool:
        return request.ref.number in self._cancelled

    def is_ahead(self, request: WorkerRequest) -> bool:
        """Return False: responses are recorded, so that no model has to wait for its client."""
        return False

    def when_taken(self, request: WorkerRequest, callback: Callable[[], object]) -> None:
        """Call `callback` at once, as above."""
        callback()

    def _record(self, request: WorkerRequest, recorded: RecordedResponse) -> None:
        if request.finished:
            raise InternalError("a response was sent after the final one")
        request.finished = recorded.final
        self._arrived[request.ref.number].put(recorded)

    def _array(self, output: OutputValue) -> Array:
        """Return what a client would get. Raises `InternalError` for an output that the configuration does not allow.

        This is stricter than a server, which passes on any shape: a test should find what clients would stumble over.
        """
        array = output.array
        shape = list(array.shape)
        expected = None if self._spec is None else self._spec.outputs.get(output.name)
        if self._spec is not None and expected is not None:
            wrong = f"model '{self._spec.name}' sent output '{output.name}'"
            if output.datatype != expected.datatype:
                raise InternalError(
                    f"{wrong} as {output.datatype}, but its configuration says {expected.datatype} (data_type)"
                )
            if not fits(shape, expected.shape):
                raise InternalError(
                    f"{wrong} with shape {shape_text(shape)}, but its configuration says {shape_text(expected.shape)} "
                    f"(dims{', after the batch dimension' if self._spec.max_batch_size else ''})"
                )
        return output_array(Tensor(output.name, output.datatype, shape, to_bytes(array)))

    # ---- Host --------------------------------------------------------------------------------

    def log(self, level: str, text: str) -> None:
        self.logged.append((level, text))

    def report_memory(self, uses: Sequence[tuple[str, int, int]]) -> None:
        """Do nothing: there are no statistics."""

    @property
    def device(self) -> None:
        """See `Host`: there is no GPU."""
        return None

    @property
    def metrics(self) -> MetricRegistry:
        return self._registry
