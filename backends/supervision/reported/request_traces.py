"""Traces of requests that a worker executes: what the kernel sends to the worker, and what it adds from its reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.transport import wire
from kernel.tracing.trace import TRACED_BYTE_SIZE, TracedExecution

if TYPE_CHECKING:
    from kernel.observe.reporting.execution_times import ExecutionTimes
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request
    from kernel.tracing.trace import Trace, TracedTensor

#: The most tensors that a worker may send for a request at a time: more than any model has.
_MOST_TENSORS = 4096


#: What most requests with a trace carry to the worker.
OF_TIMES, _OF_TENSORS = wire.TraceContext(), wire.TraceContext(tensors=True)


def trace_context(trace: Trace) -> wire.TraceContext:
    """Return what the worker gets to know of a trace that is not usual, and whose request it executes."""
    spans = trace.spans
    if spans is None:
        return OF_TIMES if trace.tensors is None else _OF_TENSORS
    return wire.TraceContext(trace.traceparent, spans.state)


def trace_execution(batch: Batch, times: ExecutionTimes, instance: str, message: wire.Executed) -> None:
    """Add an execution to the traces of the requests of its batch that are not usual, before these get their responses.

    The usual ones find it in the batch.
    """
    execution: TracedExecution | None = None
    for request in batch.entries:
        if request is not None and (trace := request.trace) is not None and not trace.usual:
            if trace.explains:
                if execution is None:
                    rows = batch.rescheduled_rows + sum(each.batch_size for each in batch.requests)
                    execution = TracedExecution(
                        times, batch, instance, message.copies, message.copied_byte_size, rows, len(batch.requests)
                    )
                trace.execution = execution
            trace.executed(times)


def end_traces(batch: Batch) -> None:
    """Note that a lost worker does not execute the requests of `batch` any more."""
    if batch.traced:
        for request in batch.requests:
            if request.trace is not None:
                request.trace.not_executed()


def add_traced_tensors(request: Request | None, tensors: list[TracedTensor]) -> None:
    """Add tensors to the trace of a request. Raises ValueError for a request that is not being traced so."""
    trace = None if request is None else request.trace
    if trace is None or trace.tensors is None or len(tensors) > _MOST_TENSORS:
        raise ValueError("tensors of a request whose tensors are not traced")
    if any(len(tensor.data) > TRACED_BYTE_SIZE for tensor in tensors):
        raise ValueError(f"more than {TRACED_BYTE_SIZE} bytes of a traced tensor")
    trace.add_tensors(tensors)
