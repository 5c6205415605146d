"""Values leave the worker in portions: at once where a metric is new, later where it has changed, all at the end."""

from __future__ import annotations

import queue

import pytest

from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from backends.worker.metric_reporter import MetricReporter
from kernel.observe.metric_rules import MetricKind

NEVER_S = 3600.0


class Kernel:
    """Takes messages; `gone` like a socket whose other end was closed."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[wire.MetricsChanged] = queue.SimpleQueue()
        self.gone = False

    def take(self, message: wire.ToKernel) -> None:
        if self.gone:
            raise BrokenPipeError
        assert isinstance(message, wire.MetricsChanged)
        self.received.put(message)

    def next(self) -> wire.MetricsChanged:
        return self.received.get(timeout=20)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_what_is_defined_before_the_kernel_listens_waits(kernel: Kernel) -> None:
    reporter = MetricReporter(kernel.take, NEVER_S)
    series, _ = reporter.registry.hold(reporter.registry.define("x", "", MetricKind.COUNTER), {})
    series.increment(2.0)
    assert kernel.received.empty()
    reporter.start()
    message = kernel.received.get_nowait()
    assert [ref.name for ref in message.families] == ["x"]
    assert message.changes == [wire.MetricChange(1, 2.0)]
    reporter.stop()


def test_a_new_metric_is_known_when_its_definition_returns(kernel: Kernel) -> None:
    reporter = MetricReporter(kernel.take, NEVER_S)
    reporter.start()
    family = reporter.registry.define("x", "", MetricKind.COUNTER)
    assert [ref.name for ref in kernel.received.get_nowait().families] == ["x"]
    reporter.registry.hold(family, {})
    assert [ref.number for ref in kernel.received.get_nowait().created] == [1]
    reporter.stop()


def test_changes_are_sent_by_themselves(kernel: Kernel) -> None:
    reporter = MetricReporter(kernel.take, 0.0)
    reporter.start()
    series, held = reporter.registry.hold(reporter.registry.define("x", "", MetricKind.COUNTER), {})
    assert kernel.next().families
    assert kernel.next().created
    series.increment(1.0)
    assert kernel.next().changes == [wire.MetricChange(1, 1.0)]
    reporter.registry.release("x", held)
    assert kernel.next().removed == [1]
    reporter.stop()


def test_many_changes_leave_together_and_the_last_ones_at_the_end(kernel: Kernel) -> None:
    reporter = MetricReporter(kernel.take, NEVER_S)
    reporter.start()
    series, _ = reporter.registry.hold(reporter.registry.define("x", "", MetricKind.COUNTER), {})
    assert kernel.next().families
    assert kernel.next().created
    for _ in range(1000):
        series.increment(1.0)
    assert kernel.received.empty()
    reporter.stop()
    assert kernel.received.get_nowait().changes == [wire.MetricChange(1, 1000.0)]
    assert kernel.received.empty()


def test_a_model_without_metrics_costs_nothing(kernel: Kernel) -> None:
    reporter = MetricReporter(kernel.take, NEVER_S)
    reporter.start()
    reporter.stop()
    assert kernel.received.empty()


def test_the_end_of_the_kernel_is_noticed_elsewhere(kernel: Kernel) -> None:
    reporter = MetricReporter(kernel.take, 0.0)
    reporter.start()
    series, _ = reporter.registry.hold(reporter.registry.define("x", "", MetricKind.COUNTER), {})
    kernel.gone = True
    series.increment(1.0)
    reporter.registry.define("y", "", MetricKind.COUNTER)
    reporter.stop()


def test_a_report_that_is_too_long_for_one_message_comes_in_parts_with_the_same_effect() -> None:
    parts: list[wire.MetricsChanged] = []

    def take(message: wire.ToKernel) -> None:
        assert isinstance(message, wire.MetricsChanged)
        if len(message.created) > 100:
            raise FrameTooLarge(1 << 30)
        parts.append(message)

    reporter = MetricReporter(take, NEVER_S)
    families = [reporter.registry.define(f"x{number}", "", MetricKind.COUNTER) for number in range(70)]
    for number in range(150):
        series, _ = reporter.registry.hold(families[0], {"n": str(number)})
        series.increment(number)
    reporter.start()
    assert [len(part.families) for part in parts] == [64, 6, 0, 0, 0, 0, 0, 0]
    assert [ref.labels["n"] for part in parts for ref in part.created] == [str(number) for number in range(150)]
    assert [change.added for part in parts for change in part.changes] == list(range(150))
    last_created = max(index for index, part in enumerate(parts) if part.created)
    assert last_created < min(index for index, part in enumerate(parts) if part.changes)
    reporter.stop()


def test_a_few_changes_leave_with_a_response_and_many_are_left_to_the_thread(kernel: Kernel) -> None:
    later: list[wire.ToKernel] = []
    reporter = MetricReporter(kernel.take, NEVER_S, later.append)
    reporter.start()
    family = reporter.registry.define("x", "", MetricKind.COUNTER)
    series = [reporter.registry.hold(family, {"n": str(number)})[0] for number in range(65)]
    reporter.report_with_response()
    assert later == []
    series[0].increment(2.0)
    reporter.report_with_response()
    [message] = later
    assert isinstance(message, wire.MetricsChanged)
    assert message.changes == [wire.MetricChange(1, 2.0)]
    for each in series:
        each.increment(1.0)
    reporter.report_with_response()
    assert len(later) == 1
    reporter.stop()
