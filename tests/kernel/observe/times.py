"""Times of executions, by how long their parts took."""

from __future__ import annotations

from kernel.observe.execution_reports import ExecutionTimes


def times_until(end_ns: int, *, input_ns: int = 0, infer_ns: int = 0, output_ns: int = 0) -> ExecutionTimes:
    """Return the times of an execution that ended at `end_ns`."""
    output_start_ns = end_ns - output_ns
    input_end_ns = output_start_ns - infer_ns
    return ExecutionTimes(input_end_ns - input_ns, input_end_ns, output_start_ns, end_ns)
