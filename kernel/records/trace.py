"""The trace of one request: what happened to it, and when. It is written when everything that it waits for has ended.

A trace ends when its request has its final response, no worker executes the request, and the front door has sent what
it had to send. A child belongs to a request that another request has caused (a step of an ensemble, a call of a model).

A trace may have the beginnings of tensors. The kernel reads only tensors that are in messages. Those in shared memory
are read by the worker that has them.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.observe.execution_reports import ExecutionTimes
    from kernel.records.front_doors import FrontDoorSink
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request
    from kernel.serving.response import ResponseReceiver
    from shm.tensor import Tensor

    #: The attributes of a `UsualRequest`: in msgpack both are equal, and a tuple takes half the time.
    UsualValues = tuple[tuple[str, int] | ExecutionTimes | str | int, ...]


#: Triton's names of activities (`TRITONSERVER_InferenceTraceActivityString`).
REQUEST_START, QUEUE_START, REQUEST_END = "REQUEST_START", "QUEUE_START", "REQUEST_END"

COMPUTE_START, COMPUTE_INPUT_END = "COMPUTE_START", "COMPUTE_INPUT_END"

COMPUTE_OUTPUT_START, COMPUTE_END = "COMPUTE_OUTPUT_START", "COMPUTE_END"

QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"

#: Triton's front doors take it when the final response reaches them.
RESPONSE_COMPLETE = "INFER_RESPONSE_COMPLETE"

#: The front door for OpenAI's API takes it when the first token of a text reaches it.
FIRST_TOKEN = "FIRST_TOKEN"

#: How many bytes of a tensor are traced.
TRACED_BYTE_SIZE = 4096

#: The most names and times, and tensors, in one trace: a stream may have any number of responses.
MOST_ENTRIES = 4096


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
    #: Whether this tensor has no data, and later ones of the trace are missing, because too many bytes are traced.
    cut: bool = False


#: What a tensor takes besides its data, about; and what all tensors of a trace may take: the event loop encodes them in
#: one piece.
_TENSOR_BYTE_SIZE = 512

_MOST_TENSOR_BYTES = 2 << 20


class TensorMemory:
    """Counts the bytes of tensors in traces that have not ended. Pure."""

    def __init__(self, limit_byte_size: int = 64 << 20) -> None:
        self._left = limit_byte_size

    def take(self, byte_size: int) -> bool:
        """Count `byte_size` bytes, if that many are left. Returns whether they are."""
        if byte_size > self._left:
            return False
        self._left -= byte_size
        return True

    def give_back(self, byte_size: int) -> None:
        """Count `byte_size` bytes no more."""
        self._left += byte_size


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


class TraceRecord(msgspec.Struct, array_like=True, gc=False, tag=0):
    """A trace as it is given to the process that writes it."""

    #: Unique in the server; larger for younger traces.
    id: int
    #: 0 for the trace of a client's request.
    parent_id: int
    model_name: str
    model_version: int
    request_id: str
    #: Names and monotonic nanoseconds in turn, not in the order of time. `pairs` returns them as pairs: making these
    #: for each request would take longer than all else.
    times: list[str | int] = []
    tensors: list[TracedTensor] = []
    #: Why the request failed; empty if it did not.
    error: str = ""
    spans: SpanIds | None = None

    def pairs(self) -> list[tuple[str, int]]:
        """Return names and times in the order of time."""
        found: list[tuple[str, int]] = list(zip(self.times[::2], self.times[1::2]))  # type: ignore[arg-type]  # in turn
        return sorted(found, key=itemgetter(1))


class UsualRequest(msgspec.Struct, array_like=True, gc=False):
    """What a `UsualTrace` has of its request before the response is sent. Times are monotonic nanoseconds."""

    #: The place of the front door's names in `kernel.records.front_doors.FRONT_DOOR_NAMES`.
    door: int
    id: int
    #: The name and the version of the model.
    model: tuple[str, int]
    request_id: str
    #: As in `kernel.records.front_doors.Reception`: 0 where it took no time.
    receive_start_ns: int
    receive_end_ns: int
    request_start_ns: int
    queue_start_ns: int
    #: The attributes of `kernel.observe.execution_reports.ExecutionTimes`.
    execution_ns: tuple[int, int, int, int]
    #: When the response came: the front door got it at once.
    request_end_ns: int


class UsualTrace(msgspec.Struct, array_like=True, gc=False, tag=1):  # `USUAL_TAG`
    """The trace of a client's request that was executed once, and got one response without an error.

    Nearly all traces are so. Without names and with a place for each time, a trace takes a quarter of the bytes, and is
    formatted by one template.
    """

    send_end_ns: int
    request: UsualRequest


USUAL_TAG = 1


class TraceOutput(Protocol):
    """Takes traces that have ended."""

    def put(self, record: TraceRecord) -> None:
        """Write `record` soon. Never waits."""

    def put_usual(self, values: UsualValues, now_ns: Callable[[], int]) -> None:
        """Write a `UsualTrace` soon, whose response is sent now. Never waits."""


class TracedExecution(NamedTuple):
    """How a request was executed: the batch, its times, and what the worker said about it."""

    times: ExecutionTimes
    batch: Batch
    instance: str
    #: Large tensors of the batch that the worker has copied before and after the model, and their bytes.
    copies: int
    copied_byte_size: int
    #: The rows and the requests of the batch, counted once: a sum for each of its requests would be quadratic.
    rows: int
    request_count: int


class TraceCounts(Protocol):
    """The statistics of a model, for which some traces are examples."""

    @property
    def exemplars_look_ns(self) -> int:
        """Before this time `record_traced` need not be called, in monotonic nanoseconds."""

    def record_traced(self, duration_ns: int, trace_id: str, now_ns: int) -> None:
        """A traced request has succeeded."""


class TracedModel(Protocol):
    """A version whose requests are traced. Implemented by `kernel.serving.model.Model`."""

    @property
    def identity(self) -> tuple[str, int]:
        """The name of the model, and the version."""

    @property
    def statistics(self) -> TraceCounts: ...


class Trace(msgspec.Struct, eq=False):
    """A trace of a request that has not ended."""

    #: As in `TraceRecord`; 0 for a trace that only explains its request.
    id: int
    #: The version that executes the request.
    model: TracedModel
    #: Where the trace goes, and those of its children; None for a trace that only explains its request, and for an
    #: unusual one that has ended.
    output: TraceOutput | None
    #: What gets the responses after the trace: the sink of the request.
    inner: ResponseReceiver
    #: The same, if it is a front door's; None for a request that no client has sent.
    door: FrontDoorSink | None
    #: None after the final response: the request refers to its sink, and such a cycle waits for the garbage collector.
    request: Request | None
    now_ns: Callable[[], int]
    #: As in `TraceRecord`; known with the final response.
    request_id: str = ""
    #: Whether it can become a `UsualTrace`: a front door has received its request, and nothing has happened, and is
    #: known to happen, that this has no place for.
    #: Then the attributes from `compute` on are not used: its batch has the times of its execution.
    usual: bool = True
    batch: Batch | None = None
    #: Counts its tensors; None if it gets none.
    tensors: TensorMemory | None = None
    #: Whether responses say how the request has travelled.
    explains: bool = False
    parent_id: int = 0
    spans: SpanIds | None = None
    #: As in `TraceRecord`, but for the times of the last execution. None as long as there are none.
    times: list[str | int] | None = None
    traced_tensors: list[TracedTensor] | None = None
    #: Of them all, as `tensors` counts them.
    tensors_byte_size: int = 0
    error: str = ""
    #: The times of the last execution, and all about it if `explains`.
    compute: ExecutionTimes | None = None
    execution: TracedExecution | None = None
    #: How many instances execute the request: 0 or 1.
    executing: int = 0
    #: How many responses are on their way to the client.
    sending: int = 0
    #: Whether the request has its final response.
    ended: bool = False

    @property
    def trace_id(self) -> str:
        """By which the trace is found: the id of OpenTelemetry, or the number in the file."""
        return str(self.id) if self.spans is None else self.spans.trace_id

    @property
    def traceparent(self) -> str:
        """The W3C trace context for whatever the model calls while it executes; empty without OpenTelemetry."""
        spans = self.spans
        return "" if spans is None else f"00-{spans.trace_id}-{spans.compute}-01"

    @property
    def has_ended(self) -> bool:
        """Whether it was written."""
        return self.request is None if self.usual else self.output is None

    def stamp(self, name: str, at_ns: int) -> None:
        """Add an activity and its time in monotonic nanoseconds. A backend may add activities with names of its own."""
        if self.times is None or len(self.times) < MOST_ENTRIES:
            self.add_times(name, at_ns)

    def add_times(self, *names_and_times: str | int) -> None:
        """Add what each trace has: names and times in turn."""
        self.make_unusual()
        if self.times is None:
            self.times = [*names_and_times]
        else:
            self.times += names_and_times

    def add_tensors(self, tensors: list[TracedTensor]) -> None:
        """Add inputs or outputs; their data is cut already. Where they take too much memory, the first one says so."""
        self.make_unusual()
        if self.tensors is None:
            return
        held = self.traced_tensors = self.traced_tensors or []
        for tensor in tensors:
            if len(held) >= MOST_ENTRIES or (held and held[-1].cut):
                return
            byte_size = _TENSOR_BYTE_SIZE + len(tensor.data)
            if self.tensors_byte_size + byte_size <= _MOST_TENSOR_BYTES and self.tensors.take(byte_size):
                self.tensors_byte_size += byte_size
            else:
                tensor.data, tensor.cut = b"", True
            held.append(tensor)

    def make_unusual(self) -> None:
        """Something has happened that a `UsualTrace` has no place for."""
        self.usual = False
        batch, self.batch = self.batch, None
        if batch is not None:
            self.compute = batch.times
            if batch.times is None:
                self.executing += 1
                batch.notifies_traces = True

    def begin_execution(self, batch: Batch) -> None:
        """An instance has got the request, not for the first time or not in the usual way."""
        self.make_unusual()
        self.executing += 1
        batch.notifies_traces = True

    def executed(self, times: ExecutionTimes) -> None:
        """The execution has ended. Perhaps the request has its final response already."""
        if self.compute is not None:  # the model had given the request back
            self.add_times(*_of_execution(self.compute))
        self.compute = times
        self.executing -= 1
        if self.ended:
            self.check_ended()

    def not_executed(self) -> None:
        """The instance that had the request is lost, or has given it back."""
        if self.batch is not None:
            self.batch = None
            return
        self.executing -= 1
        self.check_ended()

    def end_send(self, name: str, at_ns: int) -> None:
        """The client's socket has taken a response, or it is no longer wanted; `name` is what the front door calls
        this."""
        self.stamp(name, at_ns)
        self.sending -= 1
        self.check_ended()

    def check_ended(self) -> None:
        """Write the trace if nothing is to come."""
        if self.ended and not self.executing and not self.sending and self.output is not None:
            output, self.output = self.output, None
            output.put(self.record())
            if self.tensors is not None:
                self.tensors.give_back(self.tensors_byte_size)

    def record(self) -> TraceRecord:
        """Return all that is known until now."""
        times = [*(self.times or ())]
        if self.compute is not None:
            times += _of_execution(self.compute)
        return TraceRecord(
            self.id, self.parent_id, *self.model.identity, self.request_id, times,
            self.traced_tensors or [], self.error, self.spans,
        )  # fmt: skip


def _of_execution(times: ExecutionTimes) -> tuple[str | int, ...]:
    return (
        COMPUTE_START, times.compute_start_ns, COMPUTE_INPUT_END, times.input_end_ns,
        COMPUTE_OUTPUT_START, times.output_start_ns, COMPUTE_END, times.compute_end_ns,
    )  # fmt: skip


def traced_inline(activity: str, tensor: Tensor) -> TracedTensor:
    """Return what a trace shows of `tensor`: without data if it is not inline."""
    data = b"" if tensor.data is None else bytes(memoryview(tensor.data)[:TRACED_BYTE_SIZE])
    return TracedTensor(activity, tensor.name, tensor.datatype, list(tensor.shape), data, tensor.byte_size)
