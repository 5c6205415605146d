"""Adds the custom metrics that one worker reports to those of the model version.

Reports are not trusted: a report that breaks the protocol raises ValueError, which ends the worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument
from kernel.observe.custom_metrics import TooManySeries
from kernel.observe.metric_rules import MetricKind, check_buckets, check_family_name, checked_labels

if TYPE_CHECKING:
    from backends.transport import wire
    from kernel.observe.custom_metrics import CustomFamily, CustomMetrics, CustomSeries
    from kernel.observe.metric_rules import Labels

logger = logging.getLogger(__name__)


class _HeldSeries(msgspec.Struct, frozen=True):
    """A series of the worker. `series` is None if the model version has reached its limit of series."""

    family: CustomFamily
    labels: Labels
    bounds: list[float]
    series: CustomSeries | None


class ReportedMetrics:
    """The metrics of one worker, by the worker's numbers."""

    def __init__(self, title: str, metrics: CustomMetrics) -> None:
        """`title` is the name of the instance in the log."""
        self._title = title
        self._metrics = metrics
        self._families: dict[str, CustomFamily] = {}
        self._held: dict[int, _HeldSeries] = {}
        self._limit_logged = False

    def take(self, message: wire.MetricsChanged, now_ns: int) -> None:
        """Apply a report. Raises ValueError for one that breaks the protocol."""
        try:
            for family in message.families:
                self._define(family)
            for created in message.created:
                self._hold(created)
        except InvalidArgument as error:
            raise ValueError(error.message) from error
        for change in message.changes:
            self._change(change, now_ns)
        for number in message.removed:
            held = self._known(number)
            del self._held[number]
            if held.series is not None:
                self._metrics.release(held.family, held.labels)

    def end(self) -> None:
        """The worker has ended: release its series."""
        held, self._held = self._held, {}
        for each in held.values():
            if each.series is not None:
                self._metrics.worker_ended(each.family, each.labels)

    def _define(self, ref: wire.MetricFamilyRef) -> None:
        check_family_name(ref.name)
        self._families[ref.name] = self._metrics.define(ref.name, ref.description, MetricKind(ref.kind))

    def _hold(self, ref: wire.MetricSeriesRef) -> None:
        if ref.number in self._held:
            raise ValueError(f"metric {ref.number} exists")
        family = self._families.get(ref.family)
        if family is None:
            raise ValueError(f"there is no metric family '{ref.family}'")
        labels = checked_labels(ref.labels, family.kind)
        check_buckets(ref.buckets)
        try:
            series = self._metrics.hold(family, labels, ref.buckets)
        except TooManySeries:
            self._log_limit()
            series = None
        self._held[ref.number] = _HeldSeries(family, labels, ref.buckets, series)

    def _change(self, change: wire.MetricChange, now_ns: int) -> None:
        held = self._known(change.series)
        kind, series = held.family.kind, held.series
        if kind is MetricKind.HISTOGRAM:
            if len(change.counts) != len(held.bounds) + 1 or any(count < 0 for count in change.counts):
                raise ValueError(f"{len(change.counts)} buckets of a histogram with {len(held.bounds)} bounds")
        elif kind is MetricKind.COUNTER and (change.absolute or change.added < 0):
            raise ValueError("a change of a counter that does not increase it")
        if series is None:
            return
        series.changed_ns = now_ns
        if series.histogram is not None:
            series.observe(held.bounds, change.counts, change.added)
        else:
            series.value = change.added if change.absolute else series.value + change.added

    def _known(self, number: int) -> _HeldSeries:
        held = self._held.get(number)
        if held is None:
            raise ValueError(f"there is no metric {number}")
        return held

    def _log_limit(self) -> None:
        if not self._limit_logged:
            self._limit_logged = True
            logger.error("model instance '%s' has more metrics than a model may have; some are left out", self._title)
