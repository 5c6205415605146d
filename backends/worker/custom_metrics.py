"""The metrics that the model of this worker defines. The metric reporter sends their changes to the kernel.

Changing a value takes less than a microsecond and sends nothing. All methods are thread-safe. Finalizers of objects,
which can interrupt any code, may call `release`.

Reports changes of the model's custom metrics to the kernel, on its own thread.

A new metric is reported at once. Changed values are reported with the next response, so that a scrape after it shows
them, or `INTERVAL_S` later: those of models that change many, and those that are changed between requests. A killed
worker loses at most the changes of one interval.
"""

from __future__ import annotations

import abc
import contextlib
import queue
import threading
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, ClassVar

import msgspec

from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from backends.transport.texts import shortened
from kernel.errors import InvalidArgument, Unsupported
from kernel.observe.metric_rules import MAX_SERIES, Labels, MetricKind, check_buckets, check_family_name, checked_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


class ModelSeries(abc.ABC):
    """One series: a metric with its labels. An operation that its kind does not have raises Triton's error."""

    kind: ClassVar[MetricKind]

    def __init__(self, number: int, registry: MetricRegistry) -> None:
        self.number = number
        #: The number of the model's metric objects for this series.
        self.holders = 0
        #: The kernel knows the series.
        self.announced = False
        self._changed = False
        self._lock = registry.lock
        self._note_change = registry.note_change

    def increment(self, amount: float) -> None:
        """Add `amount`. Raises `Unsupported`, or `InvalidArgument` if a counter would decrease."""
        raise self._unsupported("Increment")

    def set(self, value: float) -> None:
        """Replace the value of a gauge. Raises `Unsupported`."""
        raise self._unsupported("Set")

    def observe(self, value: float) -> None:
        """Count an observation of a histogram. Raises `Unsupported`."""
        raise self._unsupported("Observe")

    def value(self) -> float:
        """Return the value in this worker. Raises `Unsupported` for histograms."""
        raise self._unsupported("Value")

    @abc.abstractmethod
    def take(self) -> wire.MetricChange:
        """Return the change since the last call. The caller holds the registry's lock."""

    def _first_change(self) -> None:
        self._changed = True
        self._note_change(self)

    def _unsupported(self, operation: str) -> Unsupported:
        return Unsupported(f"TRITONSERVER_METRIC_KIND_{self.kind.name} does not support {operation}")


class Counter(ModelSeries):
    kind = MetricKind.COUNTER

    def __init__(self, number: int, registry: MetricRegistry) -> None:
        super().__init__(number, registry)
        self._value = self._added = 0.0

    def increment(self, amount: float) -> None:
        if amount < 0.0:
            raise InvalidArgument(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        with self._lock:
            self._value += amount
            self._added += amount
            if not self._changed:
                self._first_change()

    def value(self) -> float:
        return self._value

    def take(self) -> wire.MetricChange:
        added, self._added, self._changed = self._added, 0.0, False
        return wire.MetricChange(self.number, added)


class Gauge(ModelSeries):
    kind = MetricKind.GAUGE

    def __init__(self, number: int, registry: MetricRegistry) -> None:
        super().__init__(number, registry)
        self._value = self._added = 0.0
        self._was_set = False

    def increment(self, amount: float) -> None:
        with self._lock:
            self._value += amount
            self._added += amount
            if not self._changed:
                self._first_change()

    def set(self, value: float) -> None:
        with self._lock:
            self._value = self._added = value
            self._was_set = True
            if not self._changed:
                self._first_change()

    def value(self) -> float:
        return self._value

    def take(self) -> wire.MetricChange:
        change = wire.MetricChange(self.number, self._added, self._was_set)
        self._added, self._was_set, self._changed = 0.0, False, False
        return change


class ModelHistogram(ModelSeries):
    kind = MetricKind.HISTOGRAM

    def __init__(self, number: int, registry: MetricRegistry, bounds: Sequence[float]) -> None:
        super().__init__(number, registry)
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value
            if not self._changed:
                self._first_change()

    def take(self) -> wire.MetricChange:
        change = wire.MetricChange(self.number, self._sum, False, self._counts)
        self._counts = [0] * len(self._counts)
        self._sum, self._changed = 0.0, False
        return change


class ModelFamily(msgspec.Struct, frozen=True):
    """A family that the model has defined. As in Triton, it stays when its last series is removed."""

    name: str
    description: str
    kind: MetricKind


class MetricRegistry:
    """All metrics of the worker's model, and their changes that the kernel does not know yet."""

    def __init__(self, announce: Callable[[], None], wake: Callable[[], None]) -> None:
        """`announce` is called for a new family or series, without the lock. `wake` is called for a changed value,
        with the lock or in a finalizer."""
        # Reentrant: a finalizer of the model may change a metric while its thread holds the lock.
        self.lock = threading.RLock()
        self._announce = announce
        self._wake = wake
        self._families: dict[str, ModelFamily] = {}
        self._series: dict[tuple[str, Labels], ModelSeries] = {}
        self._next_number = 1
        self._new_families: list[ModelFamily] = []
        self._created: list[tuple[ModelSeries, wire.MetricSeriesRef]] = []
        self._changed: list[ModelSeries] = []
        self._removed: list[ModelSeries] = []
        #: Series that finalizers have released, as (family name, labels).
        self._released: deque[tuple[str, Labels]] = deque()

    def define(self, name: str, description: str, kind: MetricKind) -> ModelFamily:
        """Return the family called `name`; create it if it does not exist. Raises `InvalidArgument`."""
        check_family_name(name)
        with self.lock:
            family = self._families.get(name)
            if family is not None:
                if family.kind is not kind:
                    raise InvalidArgument("Family name already exists with different type")
                return family
            self._check_room()
            family = self._families[name] = ModelFamily(
                name, shortened(description.encode(errors="replace").decode()), kind
            )
            self._new_families.append(family)
        self._announce()
        return family

    def hold(
        self, family: ModelFamily, labels: Mapping[str, str], bounds: Sequence[float] = ()
    ) -> tuple[ModelSeries, Labels]:
        """Return the series of `family` with `labels`, and its sorted labels; the caller releases it with these, once.

        `bounds` are the buckets of a new histogram. Raises `InvalidArgument`.
        """
        checked = checked_labels(labels, family.kind)
        check_buckets(bounds)
        key = (family.name, checked)
        with self.lock:
            self._remove_released()
            series = self._series.get(key)
            if series is not None:
                series.holders += 1
                return series, checked
            self._check_room()
            series = self._series[key] = self._new_series(family, bounds)
            series.holders = 1
            self._created.append(
                (series, wire.MetricSeriesRef(series.number, family.name, dict(checked), list(bounds)))
            )
        self._announce()
        return series, checked

    def release(self, family_name: str, labels: Labels) -> None:
        """Release a held series; the last holder removes it. Uses no lock, so finalizers may call it."""
        self._released.append((family_name, labels))
        self._wake()

    def note_change(self, series: ModelSeries) -> None:
        """Note the first change of `series` since `take`. The caller holds the lock."""
        self._changed.append(series)
        if len(self._changed) == 1:
            self._wake()

    @property
    def changed_count(self) -> int:
        """How many series were changed since `take`."""
        return len(self._changed)

    def take(self) -> list[wire.MetricsChanged]:
        """Return the changes since the last call. New families and series, with their changes, are the last message."""
        with self.lock:
            self._remove_released()
            families, created, changed, removed = self._new_families, self._created, self._changed, self._removed
            self._new_families, self._created, self._changed, self._removed = [], [], [], []
            known = wire.MetricsChanged(
                changes=[series.take() for series in changed if series.announced],
                removed=[series.number for series in removed if series.announced],
            )
            new = wire.MetricsChanged(
                [wire.MetricFamilyRef(family.name, family.description, family.kind.value) for family in families],
                [ref for _, ref in created],
                [series.take() for series in changed if not series.announced],
                [series.number for series in removed if not series.announced],
            )
            for series, _ in created:
                series.announced = True
        return [message for message in (known, new) if message != wire.MetricsChanged()]

    def _new_series(self, family: ModelFamily, bounds: Sequence[float]) -> ModelSeries:
        number = self._next_number
        self._next_number += 1
        if family.kind is MetricKind.HISTOGRAM:
            return ModelHistogram(number, self, bounds)
        return Counter(number, self) if family.kind is MetricKind.COUNTER else Gauge(number, self)

    def _check_room(self) -> None:
        if len(self._families) + len(self._series) >= MAX_SERIES:
            raise InvalidArgument(f"A model instance has at most {MAX_SERIES} metrics")

    def _remove_released(self) -> None:
        """Remove the series that no metric object holds any more."""
        while self._released:
            key = self._released.popleft()
            series = self._series[key]
            series.holders -= 1
            if not series.holders:
                del self._series[key]
                self._removed.append(series)


#: Long enough to cost little, and much shorter than the scrape interval of Prometheus.
INTERVAL_S = 0.1

#: How many changed series are reported with a response: few enough to take no time.
_FEW = 64

#: How many families, series or changes a part of a report has. Each is limited (`kernel.observe.metric_rules`).
_PART_LENGTH = 64


class MetricReporter:
    """Owns the worker's registry. A model without metrics needs no thread and no message."""

    def __init__(
        self,
        send: Callable[[wire.ToKernel], None],
        interval_s: float = INTERVAL_S,
        send_later: Callable[[wire.ToKernel], None] | None = None,
    ) -> None:
        """`send_later` sends a message with the next one; by default `send` does."""
        self._send = send
        self._send_later = send_later or send
        self._interval_s = interval_s
        # SimpleQueue.put is reentrant: a finalizer may call it during another put.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.registry = MetricRegistry(self.report, lambda: self._signals.put(None))
        #: Held while changes are taken and sent: the kernel must get a series before its changes.
        self._report_lock = threading.Lock()
        self._started = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """The kernel accepts reports from now on. Report all existing metrics."""
        self._started = True
        self.report()

    def stop(self) -> None:
        """Stop the thread and report the last changes."""
        if self._thread is not None:
            self._stopping.set()
            self._signals.put(None)
            self._thread.join()
        self.report()

    def report(self) -> None:
        """Send all changes now. A connection that is closed is not an error here: `KernelMessageReader` reports it."""
        if not self._started:
            return
        with self._report_lock, contextlib.suppress(OSError):
            for message in self.registry.take():
                self._send_all(message)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
                    self._thread.start()

    def report_with_response(self) -> None:
        """Send the changes with the response that follows, unless there are many of them: these are reported soon."""
        if self._thread is None or not 0 < self.registry.changed_count <= _FEW:  # most models have no metrics
            return
        with self._report_lock, contextlib.suppress(OSError):
            for message in self.registry.take():
                try:
                    self._send_later(message)
                except FrameTooLarge:
                    self._send_all(message)

    def _send_all(self, message: wire.MetricsChanged) -> None:
        """Send a report, in parts if it is longer than a message may be."""
        try:
            self._send(message)
        except FrameTooLarge:
            for part in _parts(message):
                self._send(part)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._signals.get()
            self._stopping.wait(self._interval_s)
            while not self._signals.empty():  # the next report includes their changes
                self._signals.get_nowait()
            self.report()


def _parts(message: wire.MetricsChanged) -> Iterator[wire.MetricsChanged]:
    """Yield parts of a report that have the same effect in this order."""
    for field in wire.MetricsChanged.__struct_fields__:
        entries = getattr(message, field)
        for start in range(0, len(entries), _PART_LENGTH):
            yield wire.MetricsChanged(**{field: entries[start : start + _PART_LENGTH]})
