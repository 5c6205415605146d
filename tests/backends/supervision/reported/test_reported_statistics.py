"""Reports of a backend, from the worker's messages to the statistics."""

from __future__ import annotations

import pytest

from backends.supervision.reported.reported_statistics import ReportedStatistics
from backends.transport import wire
from kernel.observe.reporting.execution_times import ExecutionTimes
from kernel.observe.reporting.instance_memory import MemoryUsage
from kernel.observe.statistics import ModelStatistics
from kernel.serving.batch import Batch
from kernel.serving.request import Request
from kernel.testing import RecordingSink

TIMES = wire.StageTimes(10, 20, 30, 40)


class Lab:
    """A batch of two requests, numbers 5 and 6, that a worker executes."""

    def __init__(self) -> None:
        self.statistics = ModelStatistics()
        self.reports = ReportedStatistics("m_0", self.statistics)
        self.first, self.second = (Request("m", [], RecordingSink()) for _ in range(2))
        self.batch = Batch([self.first, self.second], number=3, first_request_number=5)
        self.live = {5: self.first, 6: self.second}

    def take(self, *, offset_ns: int = 0, ended: bool = False, **parts: object) -> None:
        message = wire.Reported(3, **parts)  # type: ignore[arg-type]
        self.reports.take(message, self.live, {} if ended else {3: self.batch}, offset_ns)


def test_reports_wait_for_the_end_of_their_batch() -> None:
    lab = Lab()
    lab.take(requests=[wire.RequestReport(6, TIMES, False)], batches=[wire.BatchReport(2, TIMES)], offset_ns=100)
    assert lab.reports.pending
    found = lab.reports.of_batch(lab.batch)
    assert found is not None
    assert list(found.requests) == [lab.second]
    assert found.requests[lab.second].times == ExecutionTimes(110, 120, 130, 140)
    assert not found.requests[lab.second].success
    assert [each.rows for each in found.executions] == [2]
    assert not lab.reports.pending
    assert lab.reports.of_batch(lab.batch) is None


def test_a_late_report_corrects_what_was_counted() -> None:
    lab = Lab()
    measured = ExecutionTimes(1, 1, 2, 2)
    lab.statistics.record_execution(lab.batch, measured, 50, 0)
    del lab.live[5]
    lab.reports.counted(lab.batch, measured, 50, lab.live)
    lab.take(requests=[wire.RequestReport(6, TIMES)], ended=True)
    assert (lab.statistics.success.count, lab.statistics.infer_ns) == (2, 1 + 10)
    assert not lab.reports.open
    assert not lab.reports.pending


def test_a_report_about_a_request_that_nobody_waits_for_is_dropped() -> None:
    lab = Lab()
    lab.take(requests=[wire.RequestReport(99, TIMES)], ended=True)
    assert not lab.reports.pending


def test_reports_that_no_worker_of_ours_sends_are_refused() -> None:
    lab = Lab()
    with pytest.raises(ValueError, match="not in order"):
        lab.take(requests=[wire.RequestReport(5, wire.StageTimes(4, 3, 2, 1))])
    with pytest.raises(ValueError, match="the outcome 'lost'"):
        lab.take(responses=[wire.ResponseReport(0, "lost", 1, 2, 3)])
    with pytest.raises(ValueError, match="257 kinds"):
        lab.reports.take_memory(wire.MemoryUsed([wire.MemoryUse("CPU", 0, 1)] * 257))


def test_the_memory_of_a_worker_ends_with_it() -> None:
    lab = Lab()
    lab.reports.take_memory(wire.MemoryUsed([wire.MemoryUse("GPU", 2, 64)]))
    assert lab.statistics.memory.total() == [MemoryUsage("GPU", 2, 64)]
    lab.reports.end()
    assert lab.statistics.memory.total() == []
