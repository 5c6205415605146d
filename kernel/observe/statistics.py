"""What a model version has done: counts and durations, as plain integers that are rendered when asked for.

Meanings are Triton's (statistics extension): `inference_count` counts rows, `execution_count` batches;
a request that fails counts in `fail` alone. Durations are nanoseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import Cancelled, QueueFull, QueueTimeout

if TYPE_CHECKING:
    from kernel.batch import Batch
    from kernel.errors import ServingError
    from kernel.request import Request

#: Why requests failed, the `reason` label of nv_inference_request_failure.
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


class Duration(msgspec.Struct):
    """How often something was done and how long it took altogether."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns


class BatchStatistics(msgspec.Struct):
    """Executions of one batch size."""

    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelStatistics:
    """Counters of one model version, lost when it is loaded again."""

    def __init__(self) -> None:
        self.inference_count = 0
        self.execution_count = 0
        #: Milliseconds since the epoch of the last execution, 0 before the first.
        self.last_inference_ms = 0
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        self.batches: dict[int, BatchStatistics] = {}
        self.failures: dict[str, int] = dict.fromkeys(FAILURE_REASONS, 0)
        #: Requests that were accepted and are not executing yet.
        self.pending = 0
        #: How often a worker of this version died.
        self.workers_lost = 0
        self.load_ns = 0

    def record_execution(self, batch: Batch, times: ExecutionTimes, now_ns: int, now_ms: int) -> None:
        """Count an execution that has ended, and each of its requests that has not failed."""
        self.execution_count += 1
        self.last_inference_ms = now_ms
        size = self.batches.get(batch.rows)
        if size is None:
            size = self.batches[batch.rows] = BatchStatistics(Duration(), Duration(), Duration())
        size.compute_input.add(times.input_ns)
        size.compute_infer.add(times.infer_ns)
        size.compute_output.add(times.output_ns)
        for request in batch.requests:
            if request.failed:
                continue
            self.inference_count += request.batch_size
            self.success.add(now_ns - request.received_ns)
            # Whatever was not computing was waiting, also at a worker that was given it ahead of time.
            self.queue.add(max(0, now_ns - request.queue_start_ns - times.total_ns))
            self.compute_input.add(times.input_ns)
            self.compute_infer.add(times.infer_ns)
            self.compute_output.add(times.output_ns)

    def record_failure(self, request: Request, error: ServingError, now_ns: int) -> None:
        """Count a request that got `error`. One refused by a full queue was never accepted (Triton)."""
        if isinstance(error, QueueFull):
            return
        self.fail.add(now_ns - request.received_ns)
        self.failures[_reason(request, error)] += 1


class ExecutionTimes(msgspec.Struct, frozen=True):
    """Where the time of one execution went, in nanoseconds."""

    input_ns: int
    infer_ns: int
    output_ns: int

    @property
    def total_ns(self) -> int:
        return self.input_ns + self.infer_ns + self.output_ns


def _reason(request: Request, error: ServingError) -> str:
    if isinstance(error, QueueTimeout):
        return "REJECTED"
    if isinstance(error, Cancelled):
        return "CANCELED"
    return "BACKEND" if request.dispatched else "OTHER"
