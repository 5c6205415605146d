"""Metrics in a worker: what is counted, and what of it is told when."""

from __future__ import annotations

import threading

import pytest

from backends.metric_registry import MetricRegistry
from backends.transport import wire
from kernel.errors import InvalidArgument, Unsupported
from kernel.observe.metric_rules import MAX_SERIES, MetricKind

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


class Bench:
    def __init__(self) -> None:
        self.announced = 0
        self.woken = 0
        self.registry = MetricRegistry(self._announce, self._wake)

    def _announce(self) -> None:
        self.announced += 1

    def _wake(self) -> None:
        self.woken += 1

    def taken(self) -> wire.MetricsChanged:
        """Return what has changed, which fits into one message."""
        (message,) = self.registry.take()
        return message


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_new_metric_is_announced_with_its_family_and_what_it_counted(bench: Bench) -> None:
    family = bench.registry.define("x", "help", COUNTER)
    series, _ = bench.registry.hold(family, {"b": "2", "a": "1"})
    assert bench.announced == 2
    series.increment(1.5)
    assert bench.taken() == wire.MetricsChanged(
        [wire.MetricFamilyRef("x", "help", "counter")],
        [wire.MetricSeriesRef(1, "x", {"a": "1", "b": "2"})],
        [wire.MetricChange(1, 1.5)],
    )
    assert bench.registry.take() == []


def test_a_counter_tells_what_was_added_since(bench: Bench) -> None:
    series, _ = bench.registry.hold(bench.registry.define("x", "", COUNTER), {})
    bench.registry.take()
    for amount in (1.0, 2.0):
        series.increment(amount)
    assert bench.woken == 1, "once until it is taken"
    assert bench.taken() == wire.MetricsChanged(changes=[wire.MetricChange(1, 3.0)])
    series.increment(0.5)
    assert bench.woken == 2
    assert bench.taken() == wire.MetricsChanged(changes=[wire.MetricChange(1, 0.5)])
    assert series.value() == 3.5


def test_a_gauge_tells_what_it_was_set_to_or_what_was_added(bench: Bench) -> None:
    series, _ = bench.registry.hold(bench.registry.define("x", "", GAUGE), {})
    bench.registry.take()
    series.increment(5.0)
    series.increment(-2.0)
    assert bench.taken().changes == [wire.MetricChange(1, 3.0)]
    series.set(10.0)
    series.increment(1.0)
    assert bench.taken().changes == [wire.MetricChange(1, 11.0, True)]
    series.increment(1.0)
    assert bench.taken().changes == [wire.MetricChange(1, 1.0)]
    assert series.value() == 12.0


def test_a_histogram_tells_its_buckets(bench: Bench) -> None:
    series, _ = bench.registry.hold(bench.registry.define("x", "", HISTOGRAM), {}, [1.0, 2.0])
    assert bench.taken().created == [wire.MetricSeriesRef(1, "x", {}, [1.0, 2.0])]
    for value in (1.0, 1.5, 99.0):
        series.observe(value)
    assert bench.taken().changes == [wire.MetricChange(1, 101.5, False, [1, 1, 1])]
    series.observe(0.0)
    assert bench.taken().changes == [wire.MetricChange(1, 0.0, False, [1, 0, 0])]


def test_the_same_name_and_labels_are_the_same_series(bench: Bench) -> None:
    first = bench.registry.define("x", "first", COUNTER)
    second = bench.registry.define("x", "second", COUNTER)
    assert first == second
    one, held = bench.registry.hold(first, {"a": "1"})
    assert bench.registry.hold(second, {"a": "1"}) == (one, held)
    with pytest.raises(InvalidArgument, match="^Family name already exists with different type$"):
        bench.registry.define("x", "", GAUGE)


def test_a_series_is_removed_when_it_was_released_as_often_as_it_was_held(bench: Bench) -> None:
    family = bench.registry.define("x", "", COUNTER)
    series, held = bench.registry.hold(family, {})
    bench.registry.hold(family, {})
    bench.registry.take()
    bench.registry.release("x", held)
    assert bench.registry.take() == []
    series.increment(1.0)
    bench.registry.release("x", held)
    assert bench.taken() == wire.MetricsChanged(changes=[wire.MetricChange(1, 1.0)], removed=[1])


def test_a_series_that_comes_back_is_another_one_and_starts_at_zero(bench: Bench) -> None:
    family = bench.registry.define("x", "", COUNTER)
    old, held = bench.registry.hold(family, {})
    bench.registry.take()
    old.increment(1.0)
    bench.registry.release("x", held)
    new, _ = bench.registry.hold(family, {})
    new.increment(2.0)
    assert new.value() == 2.0
    # In this order: the kernel must not take the new one for the old one.
    assert bench.registry.take() == [
        wire.MetricsChanged(changes=[wire.MetricChange(1, 1.0)], removed=[1]),
        wire.MetricsChanged(created=[wire.MetricSeriesRef(2, "x")], changes=[wire.MetricChange(2, 2.0)]),
    ]


def test_a_series_of_a_moment_is_told_with_its_end(bench: Bench) -> None:
    family = bench.registry.define("x", "", COUNTER)
    series, held = bench.registry.hold(family, {})
    series.increment(1.0)
    bench.registry.release("x", held)
    message = bench.taken()
    assert [ref.number for ref in message.created] == message.removed == [1]
    assert message.changes == [wire.MetricChange(1, 1.0)]


@pytest.mark.parametrize(
    ("kind", "refused"),
    [(COUNTER, ("Set", "Observe")), (GAUGE, ("Observe",)), (HISTOGRAM, ("Increment", "Set", "Value"))],
)
def test_a_kind_knows_its_operations_only(bench: Bench, kind: MetricKind, refused: tuple[str, ...]) -> None:
    series, _ = bench.registry.hold(bench.registry.define("x", "", kind), {})
    for operation in refused:
        call = getattr(series, operation.lower())
        text = f"^TRITONSERVER_METRIC_KIND_{kind.name} does not support {operation}$"
        with pytest.raises(Unsupported, match=text):
            call() if operation == "Value" else call(1.0)


def test_a_counter_does_not_go_down(bench: Bench) -> None:
    series, _ = bench.registry.hold(bench.registry.define("x", "", COUNTER), {})
    with pytest.raises(InvalidArgument, match="can only be incremented monotonically by non-negative values"):
        series.increment(-1.0)
    assert series.value() == 0.0


def test_labels_of_requests_cannot_fill_the_memory(bench: Bench) -> None:
    family = bench.registry.define("x", "", COUNTER)
    for index in range(MAX_SERIES - 1):
        bench.registry.hold(family, {"n": str(index)})
    with pytest.raises(InvalidArgument, match=f"^A model instance has at most {MAX_SERIES} metrics$"):
        bench.registry.hold(family, {"n": "one more"})
    bench.registry.hold(family, {"n": "7"})


def test_nothing_is_lost_when_threads_count_while_others_take(bench: Bench) -> None:
    series, _ = bench.registry.hold(bench.registry.define("x", "", COUNTER), {})

    def count() -> None:
        for _ in range(1000):
            series.increment(1.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    told = 0.0
    while any(thread.is_alive() for thread in threads):
        told += sum(change.added for message in bench.registry.take() for change in message.changes)
    told += sum(change.added for message in bench.registry.take() for change in message.changes)
    assert told == series.value() == 4000
