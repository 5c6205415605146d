"""Metrics that a model version defines: the sums of what its workers report. Pure.

In Triton all instances share one registry. Workers here have the same effect: their increments and observations add
up, and a gauge has the value that was set last. The families are removed with their model version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.observe.histogram import Histogram
from kernel.observe.metric_rules import MAX_SERIES, Labels, MetricKind, sample_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class TooManySeries(Exception):
    """The model version already has `MAX_SERIES` series."""


class CustomSeries(msgspec.Struct):
    """The values of one family under one set of labels."""

    #: The value of a counter or gauge.
    value: float = 0.0
    #: The observations of a histogram.
    histogram: Histogram | None = None
    #: When a worker last reported the series; monotonic.
    changed_ns: int = 0
    #: The number of workers that have the series.
    holders: int = 0

    def observe(self, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """Add observations to a histogram: `counts` per bucket, `total` is their sum."""
        assert self.histogram is not None
        self.histogram.add(bounds, counts, total)

    def merged(self, other: CustomSeries, kind: MetricKind) -> CustomSeries:
        """Return the series that the metrics page shows if two models have it. Changes neither of them."""
        if kind is MetricKind.GAUGE:
            return self if self.changed_ns > other.changed_ns else other
        if self.histogram is None or other.histogram is None:
            return CustomSeries(self.value + other.value)
        both = Histogram(self.histogram.bounds)
        for each in (self.histogram, other.histogram):
            both.add(each.bounds, each.counts, each.sum)
        return CustomSeries(histogram=both)


class CustomFamily(msgspec.Struct):
    """Series with one name and kind. As in Triton, the help text comes from the first definition."""

    name: str
    help: str
    kind: MetricKind
    series: dict[Labels, CustomSeries]


class CustomMetrics:
    """The families of one model version."""

    def __init__(self) -> None:
        #: Instances may define one name with different kinds; the metrics page shows the first.
        self.families: dict[tuple[str, MetricKind], CustomFamily] = {}
        self._series_count = 0

    def define(self, name: str, help_text: str, kind: MetricKind) -> CustomFamily:
        """Return the family with this name and kind; create it if no worker has defined it before."""
        family = self.families.get((name, kind))
        if family is None:
            family = self.families[name, kind] = CustomFamily(name, help_text, kind, {})
        return family

    def hold(self, family: CustomFamily, labels: Labels, bounds: Sequence[float]) -> CustomSeries:
        """Count one more worker that has the series, and return it. Raises `TooManySeries`.

        `bounds` are the buckets of a new histogram; an existing one keeps its own.
        """
        series = family.series.get(labels)
        if series is None:
            if self._series_count >= MAX_SERIES:
                raise TooManySeries
            self._series_count += 1
            histogram = Histogram(bounds) if family.kind is MetricKind.HISTOGRAM else None
            series = family.series[labels] = CustomSeries(histogram=histogram)
        series.holders += 1
        return series

    def release(self, family: CustomFamily, labels: Labels) -> None:
        """Count one worker less, whose model has dropped the series. The last one removes the series."""
        series = family.series[labels]
        series.holders -= 1
        if not series.holders:
            self._drop(family, labels)

    def worker_ended(self, family: CustomFamily, labels: Labels) -> None:
        """Count one worker less, which has ended. Counters and histograms stay, because they must never decrease; a
        gauge is removed with its last worker, because its value is no longer true."""
        series = family.series[labels]
        series.holders -= 1
        if not series.holders and family.kind is MetricKind.GAUGE:
            self._drop(family, labels)

    def _drop(self, family: CustomFamily, labels: Labels) -> None:
        del family.series[labels]
        self._series_count -= 1

    def check(self) -> None:
        """Recompute the number of series."""
        counted = sum(len(family.series) for family in self.families.values())
        assert self._series_count == counted, (self._series_count, counted)


def merged_families(models: Iterable[tuple[str, CustomMetrics]]) -> tuple[list[CustomFamily], list[str]]:
    """Merge the families of all models by name. Returns also a log line for each family that is left out.

    `models` are names of models and their metrics. Families without series are not returned. If the names or sample
    names of two families of different kinds collide, the first family is returned.
    """
    shown: dict[str, CustomFamily] = {}
    #: Name of a family or sample → family and model that use it.
    taken: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []
    for model, metrics in models:
        for family in metrics.families.values():
            if not family.series:
                continue
            known = shown.get(family.name)
            if known is not None and known.kind is family.kind:
                _merge_into(known, family)
                continue
            names = sample_names(family.name, family.kind)
            owners = [taken[name] for name in names if name in taken]
            if owners:
                left_out.append(
                    f"metric family '{family.name}' of model '{model}' is left out: '{owners[0][0]}' of model "
                    f"'{owners[0][1]}' has the same name with another kind, or samples of that name"
                )
                continue
            shown[family.name] = CustomFamily(family.name, family.help, family.kind, dict(family.series))
            taken.update(dict.fromkeys(names, (family.name, model)))
    return list(shown.values()), left_out


def _merge_into(known: CustomFamily, other: CustomFamily) -> None:
    for labels, series in other.series.items():
        mine = known.series.get(labels)
        known.series[labels] = series if mine is None else mine.merged(series, known.kind)
