"""Stands before the sink of a request that is traced or explained: notes when responses come, and when they are sent.

Requests that are not traced have no such sink, so that responses of theirs cost nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import msgspec

from kernel.loop.iteration_end import IterationEnd
from kernel.serving.response import Response
from kernel.tracing.explanation import explanation
from kernel.tracing.trace import BACKEND_OUTPUT, QUEUE_START, RESPONSE_COMPLETE
from kernel.tracing.traced_tensors import traced_inline

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Reception(msgspec.Struct, frozen=True, gc=False):
    """How a front door has received a request; times in monotonic nanoseconds, 0 where it took none."""

    names: FrontDoorNames
    begin_ns: int
    end_ns: int
    #: Whether responses are sent before the sink's `send` returns, and not at the end of the event-loop iteration.
    sends_at_once: bool


@runtime_checkable
class FrontDoorSink(Protocol):
    """A sink whose client is at a front door."""

    def reception(self) -> Reception:
        """Return how the request was received."""


#: Whether sinks of a class are those of a front door: to ask each sink would take microseconds.
_front_doors: dict[type, bool] = {}


def _is_front_door(sink: Sink) -> TypeGuard[FrontDoorSink]:
    found = _front_doors.get(type(sink))
    if found is None:
        found = _front_doors[type(sink)] = isinstance(sink, FrontDoorSink)
    return found


class TracedSink:
    """The sink of one request. `inner` is the one that it had."""

    __slots__ = ("_explains", "_inner", "_now_ns", "_reception", "_request", "_trace")

    def __init__(self, request: Request, trace: Trace, now_ns: Callable[[], int], *, explains: bool) -> None:
        """`now_ns` is the kernel's clock. With `explains` the responses say how the request has travelled."""
        self._inner: Sink = request.sink
        self._request: Request | None = request
        self._trace = trace
        self._explains = explains
        self._now_ns = now_ns
        self._reception: Reception | None = None
        inner = self._inner
        if _is_front_door(inner):
            found = self._reception = inner.reception()
            begin_ns = found.begin_ns or request.received_ns
            trace.stamp(found.names.receive_start, begin_ns)
            trace.stamp(found.names.receive_end, found.end_ns or begin_ns)

    @property
    def peer(self) -> str:
        return self._inner.peer

    def header(self, name: str) -> str:
        return self._inner.header(name)

    def send(self, response: Response) -> None:
        """See `Sink`."""
        trace, request, reception = self._trace, self._request, self._reception
        assert request is not None, "a response after the final one"
        now_ns = self._now_ns()
        if trace.tensors and trace.execution is None and not request.dispatched and response.outputs:
            # No worker has made the response: an ensemble, or the cache. Its large tensors are not read.
            trace.add_tensors([traced_inline(BACKEND_OUTPUT, output) for output in response.outputs])
        if self._explains and response.outputs is not None:
            response.parameters = {**(response.parameters or {}), **explanation(request, trace, now_ns)}
        if reception is None:
            if response.final:
                self._end(request, response, now_ns)
            self._inner.send(response)
            return
        if response.final:  # as in Triton, not for each response of a stream
            trace.stamp(RESPONSE_COMPLETE, now_ns)
        trace.begin_send()
        if response.final:
            self._end(request, response, now_ns)
        if response.empty:
            self._inner.send(response)
            trace.end_send()
        else:
            self._send(response, reception)

    def _end(self, request: Request, response: Response, now_ns: int) -> None:
        self._request = None  # the request refers to its sink: such a cycle waits for the garbage collector
        if request.queue_start_ns:
            self._trace.stamp(QUEUE_START, request.queue_start_ns)
        self._trace.end(now_ns, "" if response.error is None else response.error.message)

    def _send(self, response: Response, reception: Reception) -> None:
        """Pass `response` on to the front door, and note when it is sent."""
        trace = self._trace
        names, now_ns = reception.names, self._now_ns
        trace.stamp(names.send_start, now_ns())

        def sent() -> None:
            trace.stamp(names.send_end, now_ns())
            trace.end_send()

        if response.leased:
            # It is released when its last byte is sent.
            tracked = TrackedResponse(
                response.model_name, response.model_version, response.id, response.outputs, response.parameters,
                response.error, response.final, True,
            )  # fmt: skip
            tracked.released = sent
            self._inner.send(tracked)
            return
        self._inner.send(response)
        if reception.sends_at_once:
            sent()
        else:
            IterationEnd.current().add_send(sent)


class TrackedResponse(Response):
    """A response that says when it is released for the first time."""

    released: Callable[[], None] | None = None

    def release(self) -> None:
        """See `Response`."""
        leased = self.leased
        Response.release(self)
        if leased and self.released is not None:
            self.released()
