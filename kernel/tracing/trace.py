"""The trace of one request: what happened to it, and when. It is written when everything that it waits for has ended.

A trace ends when its request has its final response, no worker executes the request, and the front door has sent what
it had to send. A child belongs to a request that another request has caused (a step of an ensemble, a call of a model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from kernel.observe.statistics import ExecutionTimes

#: Triton's names of activities (`TRITONSERVER_InferenceTraceActivityString`).
REQUEST_START, QUEUE_START, REQUEST_END = "REQUEST_START", "QUEUE_START", "REQUEST_END"
COMPUTE_START, COMPUTE_INPUT_END = "COMPUTE_START", "COMPUTE_INPUT_END"
COMPUTE_OUTPUT_START, COMPUTE_END = "COMPUTE_OUTPUT_START", "COMPUTE_END"
QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"
#: Triton's front doors take it when the final response reaches them.
RESPONSE_COMPLETE = "INFER_RESPONSE_COMPLETE"

#: How many bytes of a tensor are traced.
TRACED_BYTE_SIZE = 4096

#: The most names and times, and tensors, in one trace: a stream may have any number of responses.
_MOST_ENTRIES = 2048


class TracedTensor(msgspec.Struct, array_like=True, gc=False):
    """The beginning of a tensor in a trace."""

    #: `QUEUE_INPUT` or `BACKEND_OUTPUT`.
    activity: str
    name: str
    datatype: str
    shape: list[int]
    #: At most `TRACED_BYTE_SIZE` bytes, in the form of the protocols.
    data: bytes
    #: How many bytes the tensor has.
    byte_size: int


class SpanIds(msgspec.Struct, array_like=True, gc=False):
    """The ids of a trace for OpenTelemetry, in hexadecimal digits."""

    #: 32 digits, the same for all that a client's request causes.
    trace_id: str
    #: The spans `InferRequest` (only of a request of a client), of the model, and `compute`; 16 digits each.
    root: str
    model: str
    compute: str
    #: The span of which the first of these is a part; empty for none.
    parent: str
    #: The client's `tracestate`.
    state: str = ""


class TraceRecord(msgspec.Struct, array_like=True, gc=False):
    """A trace as it is given to the process that writes it."""

    #: Unique in the server; larger for younger traces.
    id: int
    #: 0 for the trace of a client's request.
    parent_id: int
    model_name: str
    model_version: int
    request_id: str
    #: Names and monotonic nanoseconds, not in the order of time.
    times: list[tuple[str, int]] = []
    tensors: list[TracedTensor] = []
    #: Why the request failed; empty if it did not.
    error: str = ""
    spans: SpanIds | None = None


class Execution(msgspec.Struct, frozen=True, gc=False):
    """How a batch was executed, for a request in it."""

    times: ExecutionTimes
    instance: str
    #: Rows and requests of the batch.
    rows: int
    requests: int
    #: Why the batch did not wait for more requests: `Batch.closed_by`.
    closed_by: str
    #: Large tensors of the batch that the worker has copied before and after the model, and their bytes.
    copies: int
    copied_byte_size: int


class TraceOutput(Protocol):
    """Takes traces that have ended."""

    def put(self, record: TraceRecord) -> None:
        """Write `record` soon. Never waits."""


class Trace:
    """A trace of a request that has not ended."""

    __slots__ = ("_ended", "_executing", "_output", "_sending", "execution", "record", "tensors", "wall_offset_ns")

    def __init__(self, record: TraceRecord, output: TraceOutput | None, *, tensors: bool = False) -> None:
        """Without `output` the trace is not written: it only explains its request. With `tensors` it gets tensors."""
        self.record = record
        self.tensors = tensors
        #: The last execution.
        self.execution: Execution | None = None
        self._output = output
        self._executing = 0
        self._sending = 0
        self._ended = False

    @property
    def output(self) -> TraceOutput | None:
        """Where the trace goes, and those of its children; None for a trace that is not written."""
        return self._output

    @property
    def traceparent(self) -> str:
        """The W3C trace context for whatever the model calls while it executes; empty without OpenTelemetry."""
        spans = self.record.spans
        return "" if spans is None else f"00-{spans.trace_id}-{spans.compute}-01"

    def stamp(self, name: str, at_ns: int) -> None:
        """Add an activity and its time in monotonic nanoseconds. A backend may add activities with names of its own."""
        if len(self.record.times) < _MOST_ENTRIES:
            self.record.times.append((name, at_ns))

    def add_tensors(self, tensors: list[TracedTensor]) -> None:
        """Add inputs or outputs; their data is cut already."""
        if len(self.record.tensors) < _MOST_ENTRIES:
            self.record.tensors += tensors

    def dispatched(self) -> None:
        """An instance has the request: `executed` or `not_executed` follows."""
        self._executing += 1

    def executed(self, execution: Execution) -> None:
        """The execution has ended. Perhaps the request has its final response already."""
        times = execution.times
        self.execution = execution
        if len(self.record.times) < _MOST_ENTRIES:
            self.record.times += (
                (COMPUTE_START, times.compute_start_ns),
                (COMPUTE_INPUT_END, times.input_end_ns),
                (COMPUTE_OUTPUT_START, times.output_start_ns),
                (COMPUTE_END, times.compute_end_ns),
            )
        self.not_executed()

    def not_executed(self) -> None:
        """The instance that had the request is lost, or has given it back."""
        self._executing -= 1
        self._check_ended()

    def begin_send(self) -> None:
        """A response is on its way to the client: `end_send` follows."""
        self._sending += 1

    def end_send(self) -> None:
        """The client's socket has taken a response, or nobody wants it any more."""
        self._sending -= 1
        self._check_ended()

    def end(self, at_ns: int, error: str = "") -> None:
        """The request has its final response."""
        self.stamp(REQUEST_END, at_ns)
        self.record.error = error
        self._ended = True
        self._check_ended()

    def _check_ended(self) -> None:
        if self._ended and not self._executing and not self._sending and self._output is not None:
            output, self._output = self._output, None
            output.put(self.record)
