"""What the traces of requests get to know of an execution."""

from __future__ import annotations

from backends.supervision.reported.request_traces import trace_execution
from backends.transport import wire
from kernel.observe.reporting.execution_times import ExecutionTimes
from kernel.serving.batch import Batch
from kernel.serving.request import Request
from kernel.testing import RecordingSink


class ExplainedTrace:
    """The part of a trace that hears of an execution."""

    usual = False
    explains = True
    execution: object = None

    def executed(self, times: ExecutionTimes) -> None:
        self.times = times


def test_the_rows_of_a_batch_are_counted_once_for_all_its_explanations() -> None:
    requests = [Request("m", [], RecordingSink(), batch_size=rows, trace=ExplainedTrace()) for rows in (1, 3)]  # type: ignore[arg-type]
    batch = Batch([requests[0], None, requests[1]], slots=[0, 1, 2], rescheduled_rows=2)
    trace_execution(batch, ExecutionTimes(1, 2, 3, 4), "m_0", wire.Executed(1, copies=5, copied_byte_size=6))
    first, second = (request.trace.execution for request in requests if request.trace is not None)
    assert first is second
    assert first is not None
    assert (first.rows, first.request_count, first.copies, first.copied_byte_size) == (6, 2, 5, 6)
