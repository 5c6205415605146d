"""Records requests and responses: decides which, and puts its own sink in front of theirs.

Requests of clients are recorded, also those that are refused after they were decoded; those that models and ensembles
send are not, because they come again with the client's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.recording.captured import Captured, InputCapture, capture_outputs, capture_requested
from kernel.recording.format import RequestRecord, ResponseRecord
from kernel.recording.sampling import RecordSampler
from kernel.tracing.traced_sink import FRONT_DOORS, HTTP, TracedSink, is_front_door

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.recording.format import Recorded
    from kernel.recording.settings import RecordSettings
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Response, Sink
    from shm.arena import Block
    from shm.tensor import Tensor


class RecordOutput(Protocol):
    """Takes records."""

    def put(self, record: Recorded, sources: list[Tensor]) -> bool:
        """Write `record` soon, with the bytes of its sources, whose leases are the output's from now on. Never waits.

        Returns whether there was room.
        """


class Recorder:
    """Records the requests of one server."""

    def __init__(
        self,
        settings: RecordSettings,
        output: RecordOutput,
        *,
        now_ns: Callable[[], int],
        memory: Callable[[int], Block],
        trace: Callable[[Request, Model], None],
    ) -> None:
        """`memory` returns a block that the output can read. `trace` sees each request first."""
        self._settings = settings
        self._output = output
        self._now_ns = now_ns
        self._trace = trace
        self._inputs = InputCapture(settings.tensor_limit, settings.input_digests, memory)
        self._sampler = RecordSampler(settings.rate, dict(settings.model_rates))
        self._last_number = 0

    def begin(self, request: Request, model: Model) -> None:
        """Record a checked request if it is its turn."""
        self._trace(request, model)
        if request.parent is None and self._is_recorded(request, model):
            number = self._record(request, model, request.received_ns)
            if number:
                request.sink = RecordedSink(request.sink, self, number, request)

    def refused(self, request: Request, model: Model, error: ServingError) -> None:
        """Record a request that was decoded, and refused before it was queued, if it is its turn."""
        if request.parent is not None or not self._is_recorded(request, model):
            return
        now_ns = self._now_ns()
        number = self._record(request, model, request.received_ns or now_ns)
        if number:
            self._output.put(
                ResponseRecord(number, now_ns, True, error=error.message, code=error.code.value), []
            )  # fmt: skip

    def responded(self, number: int, request: Request, response: Response) -> bool:
        """Record a response before it is sent; returns whether there was room."""
        settings = self._settings
        record = ResponseRecord(number, self._now_ns(), response.final, response.model_version)
        captured = Captured()
        if response.outputs is not None:
            captured = capture_outputs(response.outputs, settings.tensor_limit, settings.output_digests)
            record.outputs = captured.tensors
        if response.parameters:
            record.parameters = dict(response.parameters)
        if response.error is not None:
            record.error, record.code = response.error.message, response.error.code.value
        if response.final:
            record.queued_ns = request.queue_start_ns
        return self._output.put(record, captured.sources)

    def _is_recorded(self, request: Request, model: Model) -> bool:
        if model.spec.sequence_batching is None:
            return self._sampler.is_recorded(model.name)
        return self._sampler.is_recorded_of_sequence(
            model.name, request.correlation_id, start=request.sequence_start, end=request.sequence_end
        )

    def _record(self, request: Request, model: Model, at_ns: int) -> int:
        """Record a request; returns its number, 0 if there was no room."""
        self._last_number = number = self._last_number + 1
        captured = self._inputs.capture(request.inputs)
        record = RequestRecord(
            number=number,
            at_ns=at_ns,
            model=model.name,
            version=model.version,
            inputs=captured.tensors,
            wanted_version=request.model_version,
            id=request.id,
            outputs=capture_requested(request.outputs),
            parameters=dict(request.parameters),
            sequence_id=request.correlation_id,
            sequence_start=request.sequence_start,
            sequence_end=request.sequence_end,
            in_sequence=model.spec.sequence_batching is not None,
            priority=request.priority,
            timeout_us=request.timeout_us,
            decoupled=model.spec.decoupled,
            protocol=_protocol_of(request.sink),
        )
        return number if self._output.put(record, captured.sources) else 0


class RecordedSink(msgspec.Struct, eq=False):
    """The sink of one request that is recorded."""

    #: The sink that the request had.
    inner: Sink
    recorder: Recorder
    number: int
    #: None after the final response, so that the request and its sink are no cycle.
    request: Request | None
    #: Whether a response found no room: then the later ones are not recorded.
    incomplete: bool = False

    @property
    def peer(self) -> str:
        return self.inner.peer

    def header(self, name: str) -> str:
        return self.inner.header(name)

    def send(self, response: Response) -> None:
        """See `Sink`."""
        request = self.request
        assert request is not None, "a response after the final one"
        if not self.incomplete:
            self.incomplete = not self.recorder.responded(self.number, request, response)
        if response.final:
            self.request = None
        self.inner.send(response)


def _protocol_of(sink: Sink) -> str:
    inner = sink.inner if isinstance(sink, TracedSink) else sink
    known = FRONT_DOORS.get(type(inner))
    if known or (known is None and is_front_door(inner)):
        return "http" if inner.reception()[0] is HTTP else "grpc"  # type: ignore[attr-defined]  # as is known
    return ""
