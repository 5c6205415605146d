"""What a worker's backend reports about executions: held until the batch ends, then counted in the statistics.

A report can come after the end of the batch, from a backend that responds later. Its request was counted with the
times of the batch then, and is counted again. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.observe.reporting.batch_reports import BatchReports, ReportedExecution, ReportedRequest
from kernel.observe.reporting.execution_times import ExecutionTimes
from kernel.observe.reporting.instance_memory import MemoryUsage
from kernel.observe.reporting.reported import OUTCOMES, CountedRequest, correct_request, record_reported_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.transport import wire
    from kernel.observe.statistics import ModelStatistics
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request

#: The most kinds and devices in one report of memory.
_MAX_USES = 256


class ReportedStatistics:
    """The reports of one worker, by the numbers of requests and batches in its messages."""

    def __init__(self, title: str, statistics: ModelStatistics, pid: int = 0) -> None:
        """`pid` is the id of the worker's process; 0 if it is on another machine."""
        self._title = title
        self._statistics = statistics
        #: Whether there are reports for a batch that has not ended.
        self.pending = False
        self._requests: dict[int, ReportedRequest] = {}
        self._executions: dict[int, list[ReportedExecution]] = {}
        #: Requests whose batch has ended, and that have no final response, by number.
        self.open: dict[int, CountedRequest] = {}
        statistics.memory.worker_started(title, pid)

    def take(
        self, message: wire.Reported, requests: Mapping[int, Request], batches: Mapping[int, Batch], offset_ns: int
    ) -> None:
        """Count reported responses, correct what was counted, and keep other reports for the end of their batch.

        `requests` have no final response, `batches` have not ended; a report about others is dropped. `offset_ns` is
        added to the worker's times. Raises ValueError for a report that breaks the protocol.
        """
        for report in message.requests:
            found = ReportedRequest(_times(report.times, offset_ns), report.success)
            counted = self.open.pop(report.request, None)
            if counted is None:
                if any(_has(batch, report.request) for batch in batches.values()):
                    self._requests[report.request] = found
                    self.pending = True
            elif (request := requests.get(report.request)) is not None:
                correct_request(self._statistics, request, counted, found)
        if message.batch in batches:
            executions = self._executions.setdefault(message.batch, [])
            executions += [ReportedExecution(each.rows, _times(each.times, offset_ns)) for each in message.batches]
            self.pending = True
        for response in message.responses:
            if response.outcome not in OUTCOMES or not response.start_ns <= response.output_start_ns <= response.end_ns:
                raise ValueError(f"a report of a response with the outcome '{response.outcome}'")
            record_reported_response(
                self._statistics, response.index, response.outcome,
                response.start_ns, response.output_start_ns, response.end_ns,
            )  # fmt: skip

    def of_batch(self, batch: Batch) -> BatchReports | None:
        """Return what was reported about a batch that ends now, and forget it. None if nothing was."""
        requests: dict[Request, ReportedRequest] = {}
        for number, request in zip(batch.request_numbers(), batch.requests, strict=True):
            report = self._requests.pop(number, None)
            if report is not None:
                requests[request] = report
        for number in range(batch.first_request_number, batch.first_request_number + len(batch.entries)):
            self._requests.pop(number, None)  # of requests that were given back
        executions = self._executions.pop(batch.number, [])
        self.pending = bool(self._requests or self._executions)
        return BatchReports(requests, executions) if requests or executions else None

    def counted(self, batch: Batch, times: ExecutionTimes, now_ns: int, requests: Mapping[int, Request]) -> None:
        """A batch has ended; those of its requests that are in `requests` have no final response yet."""
        for number in batch.request_numbers():
            if number in requests:
                self.open[number] = CountedRequest(times, now_ns)

    def take_memory(self, message: wire.MemoryUsed) -> None:
        """Note the memory that the instance uses. Raises ValueError for a report that breaks the protocol."""
        if len(message.uses) > _MAX_USES:
            raise ValueError(f"a report of memory with {len(message.uses)} kinds and devices")
        self._statistics.memory.report(
            self._title, [MemoryUsage(use.kind, use.device_id, use.byte_size) for use in message.uses]
        )

    def end(self) -> None:
        """The worker has ended."""
        self._statistics.memory.forget(self._title)


def _has(batch: Batch, number: int) -> bool:
    return batch.first_request_number <= number < batch.first_request_number + len(batch.entries)


def _times(times: wire.StageTimes, offset_ns: int) -> ExecutionTimes:
    """Return reported times on the kernel's clock. Raises ValueError if they are not in order."""
    if not times.start_ns <= times.input_end_ns <= times.output_start_ns <= times.end_ns:
        raise ValueError("reported times that are not in order")
    return ExecutionTimes(
        times.start_ns + offset_ns, times.input_end_ns + offset_ns,
        times.output_start_ns + offset_ns, times.end_ns + offset_ns,
    )  # fmt: skip
