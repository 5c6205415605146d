"""Metrics that a model version defines itself: what its workers report of them, added up. Pure.

Triton's instances share one registry, and so they do here in effect: increments and observations of all workers add
up, and a gauge that is set has the value that was set last. Families go away with their version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.observe.histogram import Histogram
from kernel.observe.metric_rules import MAX_SERIES, Labels, MetricKind, sample_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class TooManySeries(Exception):
    """A model version has as many series as it may have."""


class CustomSeries(msgspec.Struct):
    """The values of one family under one set of labels."""

    #: Of a counter or a gauge.
    value: float = 0.0
    #: Of a histogram.
    histogram: Histogram | None = None
    #: When a worker reported the series last, monotonic.
    changed_ns: int = 0
    #: How many workers have it.
    holders: int = 0

    def observe(self, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """Add observations of a histogram: how many in each bucket, and their sum."""
        assert self.histogram is not None
        self.histogram.add(bounds, counts, total)

    def joined(self, other: CustomSeries, kind: MetricKind) -> CustomSeries:
        """Return what the page shows where two models have the same series: a new one."""
        if kind is MetricKind.GAUGE:
            return self if self.changed_ns > other.changed_ns else other
        if self.histogram is None or other.histogram is None:
            return CustomSeries(self.value + other.value)
        both = Histogram(self.histogram.bounds)
        for each in (self.histogram, other.histogram):
            both.add(each.bounds, each.counts, each.sum)
        return CustomSeries(histogram=both)


class CustomFamily(msgspec.Struct):
    """Series with one name, kind and help text: that of who defined the family first (Triton)."""

    name: str
    help: str
    kind: MetricKind
    series: dict[Labels, CustomSeries]


class CustomMetrics:
    """The families of one model version."""

    def __init__(self) -> None:
        #: Instances might define one name with different kinds, of which the page shows the first.
        self.families: dict[tuple[str, MetricKind], CustomFamily] = {}
        self._series_count = 0

    def define(self, name: str, help_text: str, kind: MetricKind) -> CustomFamily:
        """Return the family with this name and kind, which is new unless a worker defined it before."""
        family = self.families.get((name, kind))
        if family is None:
            family = self.families[name, kind] = CustomFamily(name, help_text, kind, {})
        return family

    def hold(self, family: CustomFamily, labels: Labels, bounds: Sequence[float]) -> CustomSeries:
        """Return the series of `family` for a worker that has it now. Raises `TooManySeries`.

        `bounds` are those of a histogram; the first worker's stay.
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
        """A worker's model has dropped a series, which goes with the last one that has it."""
        series = family.series[labels]
        series.holders -= 1
        if not series.holders:
            self._drop(family, labels)

    def leave(self, family: CustomFamily, labels: Labels) -> None:
        """A worker that had the series has ended. What it counted stays, so that counters never go down; a gauge
        that no worker is left for would tell what is so no more."""
        series = family.series[labels]
        series.holders -= 1
        if not series.holders and family.kind is MetricKind.GAUGE:
            self._drop(family, labels)

    def _drop(self, family: CustomFamily, labels: Labels) -> None:
        del family.series[labels]
        self._series_count -= 1

    def check(self) -> None:
        """Recompute what is kept twice."""
        counted = sum(len(family.series) for family in self.families.values())
        assert self._series_count == counted, (self._series_count, counted)


def joined(models: Iterable[tuple[str, CustomMetrics]]) -> tuple[list[CustomFamily], list[str]]:
    """Return the families of all models that have series, each name once, and a line about each that is left out.

    `models` are names of models and their metrics. Where two use the same name with different kinds, or one that a
    histogram of the other gives its samples, the first one's is shown.
    """
    shown: dict[str, CustomFamily] = {}
    #: Which family has which names on the page, and whose it is.
    taken: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []
    for model, metrics in models:
        for family in metrics.families.values():
            if not family.series:
                continue
            known = shown.get(family.name)
            if known is not None and known.kind is family.kind:
                _join(known, family)
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


def _join(known: CustomFamily, other: CustomFamily) -> None:
    for labels, series in other.series.items():
        mine = known.series.get(labels)
        known.series[labels] = series if mine is None else mine.joined(series, known.kind)
