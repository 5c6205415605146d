"""The metrics in a worker, and the changes that the kernel gets.

Values leave the worker in portions: at once where a metric is new, later where it has changed, all at the end.
"""

from __future__ import annotations

import queue
import threading

import pytest

from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from backends.worker.custom_metrics import MetricRegistry, MetricReporter
from kernel.errors import InvalidArgument, Unsupported
from kernel.observe.metric_rules import MAX_SERIES, MetricKind

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


class RegistryLab:
    """A registry, and the numbers of its calls to `announce` and `wake`."""

    def __init__(self) -> None:
        self.announced = 0
        self.woken = 0
        self.registry = MetricRegistry(self._announce, self._wake)

    def _announce(self) -> None:
        self.announced += 1

    def _wake(self) -> None:
        self.woken += 1

    def taken(self) -> wire.MetricsChanged:
        """Return the changes, which are a single message."""
        (message,) = self.registry.take()
        return message


@pytest.fixture
def lab() -> RegistryLab:
    return RegistryLab()


def test_a_new_series_is_sent_with_its_family_and_value(lab: RegistryLab) -> None:
    family = lab.registry.define("x", "help", COUNTER)
    series, _ = lab.registry.hold(family, {"b": "2", "a": "1"})
    assert lab.announced == 2
    series.increment(1.5)
    assert lab.taken() == wire.MetricsChanged(
        [wire.MetricFamilyRef("x", "help", "counter")],
        [wire.MetricSeriesRef(1, "x", {"a": "1", "b": "2"})],
        [wire.MetricChange(1, 1.5)],
    )
    assert lab.registry.take() == []


def test_a_change_of_a_counter_is_the_sum_of_its_increments(lab: RegistryLab) -> None:
    series, _ = lab.registry.hold(lab.registry.define("x", "", COUNTER), {})
    lab.registry.take()
    for amount in (1.0, 2.0):
        series.increment(amount)
    assert lab.woken == 1, "wake was called more than once before take"
    assert lab.taken() == wire.MetricsChanged(changes=[wire.MetricChange(1, 3.0)])
    series.increment(0.5)
    assert lab.woken == 2
    assert lab.taken() == wire.MetricsChanged(changes=[wire.MetricChange(1, 0.5)])
    assert series.value() == 3.5


def test_a_change_of_a_gauge_is_a_new_value_or_a_sum(lab: RegistryLab) -> None:
    series, _ = lab.registry.hold(lab.registry.define("x", "", GAUGE), {})
    lab.registry.take()
    series.increment(5.0)
    series.increment(-2.0)
    assert lab.taken().changes == [wire.MetricChange(1, 3.0)]
    series.set(10.0)
    series.increment(1.0)
    assert lab.taken().changes == [wire.MetricChange(1, 11.0, True)]
    series.increment(1.0)
    assert lab.taken().changes == [wire.MetricChange(1, 1.0)]
    assert series.value() == 12.0


def test_a_change_of_a_histogram_has_counts_per_bucket(lab: RegistryLab) -> None:
    series, _ = lab.registry.hold(lab.registry.define("x", "", HISTOGRAM), {}, [1.0, 2.0])
    assert lab.taken().created == [wire.MetricSeriesRef(1, "x", {}, [1.0, 2.0])]
    for value in (1.0, 1.5, 99.0):
        series.observe(value)
    assert lab.taken().changes == [wire.MetricChange(1, 101.5, False, [1, 1, 1])]
    series.observe(0.0)
    assert lab.taken().changes == [wire.MetricChange(1, 0.0, False, [1, 0, 0])]


def test_the_same_name_and_labels_are_the_same_series(lab: RegistryLab) -> None:
    first = lab.registry.define("x", "first", COUNTER)
    second = lab.registry.define("x", "second", COUNTER)
    assert first == second
    one, held = lab.registry.hold(first, {"a": "1"})
    assert lab.registry.hold(second, {"a": "1"}) == (one, held)
    with pytest.raises(InvalidArgument, match="^Family name already exists with different type$"):
        lab.registry.define("x", "", GAUGE)


def test_a_series_is_removed_with_its_last_holder(lab: RegistryLab) -> None:
    family = lab.registry.define("x", "", COUNTER)
    series, held = lab.registry.hold(family, {})
    lab.registry.hold(family, {})
    lab.registry.take()
    lab.registry.release("x", held)
    assert lab.registry.take() == []
    series.increment(1.0)
    lab.registry.release("x", held)
    assert lab.taken() == wire.MetricsChanged(changes=[wire.MetricChange(1, 1.0)], removed=[1])


def test_a_series_that_is_created_again_starts_at_zero(lab: RegistryLab) -> None:
    family = lab.registry.define("x", "", COUNTER)
    old, held = lab.registry.hold(family, {})
    lab.registry.take()
    old.increment(1.0)
    lab.registry.release("x", held)
    new, _ = lab.registry.hold(family, {})
    new.increment(2.0)
    assert new.value() == 2.0
    # The order matters: the kernel removes the old series before it gets the new one.
    assert lab.registry.take() == [
        wire.MetricsChanged(changes=[wire.MetricChange(1, 1.0)], removed=[1]),
        wire.MetricsChanged(created=[wire.MetricSeriesRef(2, "x")], changes=[wire.MetricChange(2, 2.0)]),
    ]


def test_a_series_created_and_removed_between_two_takes_is_sent(lab: RegistryLab) -> None:
    family = lab.registry.define("x", "", COUNTER)
    series, held = lab.registry.hold(family, {})
    series.increment(1.0)
    lab.registry.release("x", held)
    message = lab.taken()
    assert [ref.number for ref in message.created] == message.removed == [1]
    assert message.changes == [wire.MetricChange(1, 1.0)]


@pytest.mark.parametrize(
    ("kind", "refused"),
    [(COUNTER, ("Set", "Observe")), (GAUGE, ("Observe",)), (HISTOGRAM, ("Increment", "Set", "Value"))],
)
def test_operations_of_other_kinds_are_refused(lab: RegistryLab, kind: MetricKind, refused: tuple[str, ...]) -> None:
    series, _ = lab.registry.hold(lab.registry.define("x", "", kind), {})
    for operation in refused:
        call = getattr(series, operation.lower())
        text = f"^TRITONSERVER_METRIC_KIND_{kind.name} does not support {operation}$"
        with pytest.raises(Unsupported, match=text):
            call() if operation == "Value" else call(1.0)


def test_a_counter_cannot_decrease(lab: RegistryLab) -> None:
    series, _ = lab.registry.hold(lab.registry.define("x", "", COUNTER), {})
    with pytest.raises(InvalidArgument, match="can only be incremented monotonically by non-negative values"):
        series.increment(-1.0)
    assert series.value() == 0.0


def test_the_number_of_metrics_is_limited(lab: RegistryLab) -> None:
    family = lab.registry.define("x", "", COUNTER)
    for index in range(MAX_SERIES - 1):
        lab.registry.hold(family, {"n": str(index)})
    with pytest.raises(InvalidArgument, match=f"^A model instance has at most {MAX_SERIES} metrics$"):
        lab.registry.hold(family, {"n": "one more"})
    lab.registry.hold(family, {"n": "7"})


def test_no_change_is_lost_when_threads_increment_during_take(lab: RegistryLab) -> None:
    series, _ = lab.registry.hold(lab.registry.define("x", "", COUNTER), {})

    def count() -> None:
        for _ in range(1000):
            series.increment(1.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken = 0.0
    while any(thread.is_alive() for thread in threads):
        taken += sum(change.added for message in lab.registry.take() for change in message.changes)
    taken += sum(change.added for message in lab.registry.take() for change in message.changes)
    assert taken == series.value() == 4000


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
        return self.received.get(timeout=60)


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
