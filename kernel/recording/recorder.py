"""Records requests and responses: decides which, and what they are recorded as.

Requests of clients are recorded, also those that are refused after they were decoded; those that models and ensembles
send are not, because they come again with the client's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.recording.captured import InputCapture, capture_outputs, capture_requested
from kernel.recording.passed import REQUEST, RESPONSE
from kernel.recording.sampling import RecordSampler
from kernel.tracing.front_doors import front_door_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.errors import ServingError
    from kernel.recording.settings import RecordSettings
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Response, ResponseReceiver, Sink
    from shm.arena import Block
    from shm.tensor import Tensor


class RecordOutput(Protocol):
    """Takes messages for the helper."""

    def put(self, message: tuple[Any, ...], sources: Sequence[Tensor] = ()) -> bool:
        """Write the record of `message` soon: the fields of a `PassedRequest` or `PassedResponse` behind its tag.

        The leases of `sources`, which have the bytes of its tensors, are the output's from now on. Never waits. Returns
        whether there was room.
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
    ) -> None:
        """`memory` returns a block that the output can read."""
        self._put = output.put
        self._now_ns = now_ns
        self._inputs = InputCapture(settings.tensor_limit, settings.input_digests, memory)
        self._sampler = RecordSampler(settings.rate, dict(settings.model_rates))
        #: Whether each request is recorded, but for those of sequences.
        self._all = settings.rate == 1 and not settings.model_rates
        self._last_number = 0

    def begin(self, request: Request, model: Model) -> None:
        """Record a checked request if it is its turn."""
        if request.parent is not None:
            return
        if not (self._all and model.spec.sequence_batching is None) and not self._is_recorded(request, model):
            return
        if request.leased:
            number = self._record_copy(request, model, request.received_ns)
        else:
            # The usual case, without further calls: all tensors are in messages.
            spec, sink = model.spec, request.sink
            self._last_number = number = self._last_number + 1
            if not self._put((
                REQUEST, number, request.received_ns, spec.name, model.version, request.inputs, request.model_version,
                request.id, request.outputs, request.parameters, request.correlation_id, request.sequence_start,
                request.sequence_end, spec.sequence_batching is not None, request.priority, request.timeout_us,
                spec.decoupled, _protocol_of(sink),
            )):  # fmt: skip
                return
        if number:
            inner = request.passage or request.sink
            request.passage = RecordedPassage(inner, self._put, self._now_ns, number, request)

    def refused(self, request: Request, model: Model, error: ServingError) -> None:
        """Record a request that was decoded, and refused before it was queued, if it is its turn."""
        if request.parent is not None or not self._is_recorded(request, model):
            return
        now_ns = self._now_ns()
        number = self._record_copy(request, model, request.received_ns or now_ns)
        if number:
            self._put((RESPONSE, number, now_ns, True, "", None, None, error.text, error.code.value, 0))

    def _is_recorded(self, request: Request, model: Model) -> bool:
        if model.spec.sequence_batching is None:
            return self._sampler.is_recorded(model.name)
        return self._sampler.is_recorded_of_sequence(
            model.name, request.correlation_id, start=request.sequence_start, end=request.sequence_end
        )

    def _record_copy(self, request: Request, model: Model, at_ns: int) -> int:
        """Record a request whose tensors may be anywhere; returns its number, 0 if there was no room."""
        self._last_number = number = self._last_number + 1
        inputs, sources = self._inputs.capture(request.inputs)
        spec, requested = model.spec, capture_requested(request.outputs)
        recorded = self._put((
            REQUEST, number, at_ns, spec.name, model.version, inputs, request.model_version, request.id, requested,
            request.parameters, request.correlation_id, request.sequence_start, request.sequence_end,
            spec.sequence_batching is not None, request.priority, request.timeout_us, spec.decoupled,
            _protocol_of(request.sink),
        ), sources)  # fmt: skip
        return number if recorded else 0


class RecordedPassage(msgspec.Struct, eq=False):
    """What the responses pass of one request that is recorded. Implements `ResponseReceiver`."""

    #: What gets the responses next: the trace, or the sink of the request.
    inner: ResponseReceiver
    #: As in `RecordOutput`; None after a response that found no room: then the later ones are not recorded.
    put: Callable[..., bool] | None
    now_ns: Callable[[], int]
    number: int
    #: None after the final response, so that the request and its sink are no cycle.
    request: Request | None

    def send(self, response: Response) -> None:
        request, put = self.request, self.put
        assert request is not None, "a response after the final one"
        queued_ns = 0
        if response.final:
            queued_ns = request.queue_start_ns
            self.request = None
        if put is not None:
            outputs: Sequence[Any] | None = response.outputs
            sources: Sequence[Tensor] = ()
            if response.leased:
                outputs, sources = capture_outputs(response.outputs or ())
            error = response.error
            if not put((
                RESPONSE, self.number, self.now_ns(), response.final, response.model_version, outputs,
                response.parameters, "" if error is None else error.text, "" if error is None else error.code.value,
                queued_ns,
            ), sources):  # fmt: skip
                self.put = None
        self.inner.send(response)


def _protocol_of(sink: Sink) -> str:
    """Return the protocol of a sink; empty if the request did not come over one."""
    door = front_door_of(sink)
    return "" if door is None else door.reception()[0].protocol
