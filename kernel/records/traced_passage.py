"""What the responses of a request pass that is traced or explained: notes when they come, and when they are sent.

It is the trace itself: one object for each traced request. If the client asks (`X-Naiad-Explain`), the response gets
parameters that say how its request was executed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kernel.records.trace import (
    BACKEND_OUTPUT,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    RESPONSE_COMPLETE,
    Trace,
    traced_inline,
)
from kernel.serving.response import Response

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.records.front_doors import Reception
    from kernel.serving.request import Request
    from kernel.serving.response import ParameterValue


class TracedPassage(Trace, eq=False):
    """The trace of one request, and what its responses pass last. Implements `ResponseReceiver`."""

    def send(self, response: Response) -> None:
        now_ns = self.now_ns()
        door, batch = self.door, self.batch
        if (
            batch is None  # also if the trace is not usual
            or batch.times is None
            or response.leased
            or response.outputs is None  # also if it has an error
            or not response.final
            or door is None
        ):
            self._send_unusual(response, now_ns)
            return
        names, begin_ns, end_ns, when_sent = door.reception()
        # The usual case, with few calls.
        request, output, model = self.request, self.output, self.model
        assert request is not None, "a response after the final one"
        assert output is not None, "a usual trace that goes nowhere"
        self.request = self.batch = None
        if now_ns >= model.statistics.exemplars_look_ns:
            model.statistics.record_traced(now_ns - request.received_ns, self.trace_id, now_ns)
        self.inner.send(response)
        values = (
            names.place, self.id, model.identity, request.id, begin_ns, end_ns, request.received_ns,
            request.queue_start_ns, batch.times, now_ns,
        )  # fmt: skip
        if when_sent is None:
            output.put_usual(values, self.now_ns)
        else:
            when_sent(partial(output.put_usual, values, self.now_ns))

    def _send_unusual(self, response: Response, now_ns: int) -> None:
        """Take any response that `send` has no short way for."""
        self.make_unusual()
        if self.explains or self.tensors is not None:
            self._describe(response, now_ns)
        if not response.final:
            self._send_one_of_several(response, now_ns)
            return
        request = self.request
        assert request is not None, "a response after the final one"
        self.request = None
        if response.error is not None:
            self.error = response.error.message
        elif self.output is not None:
            self.model.statistics.record_traced(now_ns - request.received_ns, self.trace_id, now_ns)
        self.request_id = request.id
        self.ended = True
        self._end(request, response, now_ns)

    def _end(self, request: Request, response: Response, now_ns: int) -> None:
        """Take the final response of a request that is not the usual one."""
        reception = None if self.door is None else self.door.reception()
        if reception is None:
            self.add_times(REQUEST_START, request.received_ns)
        else:
            self._stamp_reception(reception, request)
            # As in Triton, not for each response of a stream.
            self.add_times(RESPONSE_COMPLETE, now_ns)
        self.add_times(QUEUE_START, request.queue_start_ns or now_ns, REQUEST_END, now_ns)
        if reception is None or (response.outputs is None and response.error is None):
            # Before its caller gets the response, so that a child comes before its parent.
            self.check_ended()
            self.inner.send(response)
            return
        self._send(response, reception, now_ns)
        self.check_ended()

    def _stamp_reception(self, reception: Reception, request: Request) -> None:
        names, begin_ns, end_ns, _ = reception
        begin_ns = begin_ns or request.received_ns
        self.add_times(
            names.receive_start, begin_ns, names.receive_end, end_ns or begin_ns, REQUEST_START, request.received_ns
        )

    def _send_one_of_several(self, response: Response, now_ns: int) -> None:
        """Take a response that is not the final one."""
        reception = None if self.door is None else self.door.reception()
        if reception is None or (response.outputs is None and response.error is None):
            self.inner.send(response)
        else:
            self._send(response, reception, now_ns)

    def _describe(self, response: Response, now_ns: int) -> None:
        """Add an explanation to the response, and the response's tensors to the trace."""
        request = self.request
        if request is None or response.outputs is None:
            return
        if self.tensors is not None and not request.dispatched:
            # No worker has made the response: an ensemble, or the cache. Its large tensors are not read.
            self.add_tensors([traced_inline(BACKEND_OUTPUT, output) for output in response.outputs])
        if self.explains:
            response.parameters = {**(response.parameters or {}), **explanation(request, self, now_ns)}

    def _send(self, response: Response, reception: Reception, begin_ns: int) -> None:
        """Pass `response` on to the front door, and note when it is sent."""
        names, _, _, when_sent = reception
        now_ns = self.now_ns
        self.sending += 1
        self.stamp(names.send_start, begin_ns)

        def sent() -> None:
            self.end_send(names.send_end, now_ns())

        if response.leased:
            # It is released when its last byte is sent.
            tracked = TrackedResponse(
                response.model_name, response.model_version, response.id, response.outputs, response.parameters,
                response.error, response.final, True,
            )  # fmt: skip
            tracked.released = sent
            self.inner.send(tracked)
            return
        self.inner.send(response)
        if when_sent is None:
            sent()
        else:
            when_sent(sent)


class TrackedResponse(Response):
    """A response that says when it is released for the first time."""

    released: Callable[[], None] | None = None

    def release(self) -> None:
        leased = self.leased
        Response.release(self)
        if leased and self.released is not None:
            self.released()


#: The parameter of a request, and the HTTP header, that ask for an explanation.
EXPLAIN = "naiad_explain"

EXPLAIN_HEADER = "x-naiad-explain"


def take_explain(request: Request) -> bool:
    """Return whether the parameters of `request` ask for an explanation. The model does not get that parameter."""
    return bool(request.parameters) and bool(request.parameters.pop(EXPLAIN, False))


def explanation(request: Request, trace: Trace, now_ns: int) -> dict[str, ParameterValue]:
    """Return the parameters of a response: times in nanoseconds until `now_ns`, and how the request was executed.

    The times of an execution that has not ended are missing: a decoupled model responds before.
    """
    found: dict[str, ParameterValue] = {"naiad_total_ns": now_ns - request.received_ns}
    execution, composed = trace.execution, request.composed
    if execution is not None:
        times, batch = execution.times, execution.batch
        found |= {
            "naiad_queue_ns": max(0, times.compute_start_ns - request.queue_start_ns),
            "naiad_compute_input_ns": times.input_end_ns - times.compute_start_ns,
            "naiad_compute_infer_ns": times.output_start_ns - times.input_end_ns,
            "naiad_compute_output_ns": times.compute_end_ns - times.output_start_ns,
            "naiad_instance": execution.instance,
            "naiad_batch_size": execution.rows,
            "naiad_batch_requests": execution.request_count,
            "naiad_batch_closed_by": batch.closed_by,
            "naiad_copies": execution.copies,
            "naiad_copied_bytes": execution.copied_byte_size,
        }
    elif composed is not None:
        # Sums of the steps that have ended.
        found |= {
            "naiad_compute_input_ns": composed.input_ns,
            "naiad_compute_infer_ns": composed.infer_ns,
            "naiad_compute_output_ns": composed.output_ns,
        }
    if trace.output is not None:
        found["naiad_trace_id"] = trace.id
    return found
