"""Records what a model sends: the responses of its requests, and its log lines."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import msgspec

from backends.metric_registry import MetricRegistry
from backends.python.harness.calls import FunctionCalls
from backends.worker.reporting.reports import ReportCollector
from kernel.embedding.arrays import output_array
from kernel.errors import InternalError, ServingError
from kernel.serving.validation import fits, shape_text
from shm.arrays import to_bytes
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.python.harness.calls import ModelFunction
    from backends.worker.request import OutputValue, WorkerRequest
    from kernel.config.spec import ModelSpec
    from shm.arrays import Array


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
