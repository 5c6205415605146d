"""Stands before the sink of a request that is traced or explained: notes when responses come, and when they are sent.

Requests that are not traced have no such sink, so that responses of theirs cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import msgspec

from kernel.loop.iteration_end import IterationEnd
from kernel.serving.response import Response
from kernel.tracing.explanation import explanation
from kernel.tracing.trace import BACKEND_OUTPUT, QUEUE_START, REQUEST_END, RESPONSE_COMPLETE
from kernel.tracing.traced_tensors import traced_inline

if TYPE_CHECKING:
    from kernel.observe.statistics import ModelStatistics
    from kernel.serving.request import Request
    from kernel.serving.response import Sink
    from kernel.tracing.trace import Trace


class FrontDoorNames(msgspec.Struct, frozen=True, gc=False):
    """Triton's names of what a front door does."""

    receive_start: str
    receive_end: str
    send_start: str
    send_end: str


HTTP = FrontDoorNames("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")
GRPC = FrontDoorNames("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")

#: Calls what it is given once, when the response that was given to the front door before is written to its socket, or
#: nobody will write it.
WhenSent = Callable[[Callable[[], None]], object]

#: How a front door has received a request: its names; when the request began and ended to come, in monotonic
#: nanoseconds, 0 if it took no time; how to know when a response is sent, None where that is before `send` returns.
Reception = tuple[FrontDoorNames, int, int, WhenSent | None]


def at_iteration_end(callback: Callable[[], None]) -> None:
    """The `WhenSent` of front doors that write at the end of the event-loop iteration, from a task of theirs."""
    IterationEnd.current().add_send(callback)


@runtime_checkable
class FrontDoorSink(Protocol):
    """A sink whose client is at a front door."""

    def reception(self) -> Reception:
        """Return how the request was received."""


#: Whether sinks of a class are those of a front door: to ask each sink would take microseconds.
FRONT_DOORS: dict[type, bool] = {}


def is_front_door(sink: Sink) -> TypeGuard[FrontDoorSink]:
    """Whether `sink` is that of a front door, to be remembered in `FRONT_DOORS`."""
    found = FRONT_DOORS[type(sink)] = isinstance(sink, FrontDoorSink)
    return found


class TracedSink(msgspec.Struct, eq=False):
    """The sink of one request."""

    #: The sink that the request had.
    inner: Sink
    trace: Trace
    #: None after the final response: the request refers to its sink, and such a cycle waits for the garbage collector.
    request: Request | None
    now_ns: Callable[[], int]
    #: Of the front door; None for a request that no client has sent.
    names: FrontDoorNames | None = None
    when_sent: WhenSent | None = None
    #: Of the model; None if the trace is not written.
    statistics: ModelStatistics | None = None

    @property
    def peer(self) -> str:
        return self.inner.peer

    def header(self, name: str) -> str:
        return self.inner.header(name)

    def send(self, response: Response) -> None:
        """See `Sink`."""
        trace, names = self.trace, self.names
        now_ns = self.now_ns()
        if trace.explains or trace.tensors:
            self._describe(response, now_ns)
        times = trace.record.times
        if response.final:
            request = self.request
            assert request is not None, "a response after the final one"
            self.request = None
            if names is not None:  # as in Triton, not for each response of a stream
                times += (RESPONSE_COMPLETE, now_ns)
            times += (QUEUE_START, request.queue_start_ns or now_ns, REQUEST_END, now_ns)
            if response.error is not None:
                trace.record.error = response.error.message
            elif self.statistics is not None:
                exemplars, duration_ns = self.statistics.exemplars, now_ns - request.received_ns
                if exemplars is None or exemplars.due(duration_ns, now_ns):
                    self.statistics.record_traced(duration_ns, trace.record.trace_id, now_ns)
            trace.ended = True
        if names is None or (response.outputs is None and response.error is None):
            # Before its caller gets the response, so that a child comes before its parent.
            trace.check_ended()
            self.inner.send(response)
            return
        if response.leased or not response.final:
            self._send(response, names, now_ns)
            trace.check_ended()
            return
        # The usual case, without further calls.
        self.inner.send(response)
        when_sent = self.when_sent
        if when_sent is not None:
            times += (names.send_start, now_ns)
            trace.sending += 1
            when_sent(self._sent)
            return
        times += (names.send_start, now_ns, names.send_end, self.now_ns())
        if not trace.executing and not trace.sending:  # as `check_ended`, without its call
            output, trace.output = trace.output, None
            if output is not None:
                output.put(trace.record)

    def _sent(self) -> None:
        """A response is written that has no memory to be released. As `Trace.end_send`, without its calls."""
        trace, names = self.trace, self.names
        assert names is not None
        trace.record.times += (names.send_end, self.now_ns())
        trace.sending = sending = trace.sending - 1
        if trace.ended and not sending and not trace.executing:
            output, trace.output = trace.output, None
            if output is not None:
                output.put(trace.record)

    def _describe(self, response: Response, now_ns: int) -> None:
        """Add an explanation to the response, and the response's tensors to the trace."""
        trace, request = self.trace, self.request
        if request is None or response.outputs is None:
            return
        if trace.tensors and not request.dispatched:
            # No worker has made the response: an ensemble, or the cache. Its large tensors are not read.
            trace.add_tensors([traced_inline(BACKEND_OUTPUT, output) for output in response.outputs])
        if trace.explains:
            response.parameters = {**(response.parameters or {}), **explanation(request, trace, now_ns)}

    def _send(self, response: Response, names: FrontDoorNames, begin_ns: int) -> None:
        """Pass `response` on to the front door, and note when it is sent."""
        trace, now_ns = self.trace, self.now_ns
        trace.sending += 1
        trace.stamp(names.send_start, begin_ns)
        if response.leased:
            # It is released when its last byte is sent.
            tracked = TrackedResponse(
                response.model_name, response.model_version, response.id, response.outputs, response.parameters,
                response.error, response.final, True,
            )  # fmt: skip
            tracked.released = lambda: trace.end_send(names.send_end, now_ns())
            self.inner.send(tracked)
            return
        self.inner.send(response)
        if self.when_sent is None:
            self._sent()
        else:
            self.when_sent(self._sent)


class TrackedResponse(Response):
    """A response that says when it is released for the first time."""

    released: Callable[[], None] | None = None

    def release(self) -> None:
        """See `Response`."""
        leased = self.leased
        Response.release(self)
        if leased and self.released is not None:
            self.released()
