"""The parameters of a response that explain how its request was executed, if the client asks (`X-Naiad-Explain`).
Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.serving.request import Request
    from kernel.serving.response import ParameterValue
    from kernel.tracing.trace import Trace

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
