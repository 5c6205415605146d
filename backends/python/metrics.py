"""`pb_utils.MetricFamily`: metrics that a model defines. The server's metrics page shows them.

`value` returns the value in this instance; the page shows the sum of all instances. As in Triton, a metric is deleted
with the `MetricFamily` object that created it, and errors are `TritonModelException`.
"""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Any

from backends.python.conversions import as_text
from backends.python.failures import NO_CAST, TritonModelException, incompatible_arguments
from backends.python.instance import current_instance
from kernel.errors import InvalidArgument, ServingError
from kernel.observe import metric_rules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.worker.custom_metrics import ModelSeries

_FAMILY_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should "
    "be deleted AFTER its corresponding 'Metric' objects have been deleted."
)


class TritonMetricKind(enum.IntEnum):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    __str__ = enum.Enum.__str__  # as Triton's enumerations show themselves


TritonMetricKind.__name__ = "MetricKind"


class Metric:
    """One metric of a family, created by `MetricFamily.Metric`."""

    __slots__ = ("_series",)

    def __init__(self, series: ModelSeries) -> None:
        self._series: ModelSeries | None = series

    def increment(self, value: float, /) -> None:
        """Add `value` to a counter or a gauge. For a counter it must not be negative."""
        if value.__class__ is not float:
            value = _number(self, "increment", value)
        if self._series is None:
            raise TritonModelException(f"Failed to increment metric value: {_FAMILY_DELETED}")
        try:
            self._series.increment(value)
        except ServingError as error:
            raise _refused("Failed to increment metric value", error) from None

    def set(self, value: float, /) -> None:
        """Replace the value of a gauge."""
        if value.__class__ is not float:
            value = _number(self, "set", value)
        if self._series is None:
            raise TritonModelException(f"Failed to set metric value: {_FAMILY_DELETED}")
        try:
            self._series.set(value)
        except ServingError as error:
            raise _refused("Failed to set metric value", error) from None

    def observe(self, value: float, /) -> None:
        """Add the observation `value` to a histogram."""
        if value.__class__ is not float:
            value = _number(self, "observe", value)
        if self._series is None:
            raise TritonModelException(f"Failed to observe metric value: {_FAMILY_DELETED}")
        try:
            self._series.observe(value)
        except ServingError as error:
            raise _refused("Failed to observe metric value", error) from None

    def value(self) -> float:
        """Return the value of a counter or gauge in this instance."""
        if self._series is None:
            raise TritonModelException(f"Failed to get metric value: {_FAMILY_DELETED}")
        try:
            return self._series.value()
        except ServingError as error:
            raise _refused("Failed to get metric value", error) from None

    def clear(self) -> None:
        """Make the metric unusable, because its family was deleted."""
        self._series = None


class MetricFamily:
    """A family of metrics with one name, help text and kind. Objects with the same name share one family."""

    COUNTER = TritonMetricKind.COUNTER
    GAUGE = TritonMetricKind.GAUGE
    HISTOGRAM = TritonMetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: TritonMetricKind) -> None:
        #: Labels → metric. A model may request the same metric in each request.
        self._metrics: dict[metric_rules.Labels, Metric] = {}
        title, text = as_text(name), as_text(description)
        if title is None or text is None or not isinstance(kind, TritonMetricKind):
            signature = "MetricFamily(name: str, description: str, kind: MetricKind)"
            raise incompatible_arguments("__init__", signature, name, description, kind)
        self._registry = current_instance().host.metrics
        self._kind = kind
        try:
            self._family = self._registry.define(title, text, metric_rules.MetricKind[kind.name])
        except ServingError as error:
            raise _refused("Error when creating MetricFamily", error) from None

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Return the metric with `labels`. The same labels return the same object.

        `buckets` is a list of upper bounds in ascending order. A histogram needs it; other kinds must not have it.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        bounds = self._bounds(buckets)
        try:
            series, held = self._registry.hold(self._family, _label_texts(labels or {}), bounds)
        except ServingError as error:
            raise _refused("Error when creating Metric", error) from None
        metric = self._metrics.get(held)
        if metric is None:
            metric = self._metrics[held] = Metric(series)
        else:
            self._registry.release(self._family.name, held)
        return metric

    def _bounds(self, buckets: object) -> list[float]:
        if buckets is None:
            if self._kind is TritonMetricKind.HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
            return []
        if not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind is not TritonMetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if not all(_is_number(bound) for bound in buckets):
            raise RuntimeError(NO_CAST)
        return [float(bound) for bound in buckets]

    def __del__(self) -> None:
        for held, metric in self._metrics.items():
            metric.clear()
            self._registry.release(self._family.name, held)


def _refused(text: str, error: ServingError) -> TritonModelException:
    """Return the exception for the model, with Triton's text for an error of the server."""
    prefix = f"Failed to process the request for model '{current_instance().name}', message: "
    return TritonModelException(f"{text}: {prefix}{error.message}")


def _label_texts(labels: Mapping[Any, Any]) -> dict[str, str]:
    """Return `labels` with keys as texts. Like Triton, it converts them to JSON and back."""
    texts: dict[str, Any] = json.loads(json.dumps(labels))
    if not all(isinstance(text, str) for text in texts.values()):
        raise InvalidArgument("attempt to access JSON non-string as string")
    return texts


def _number(metric: Metric, call: str, value: Any) -> float:
    """Return `value` as a float. Raises `TypeError` if it is not a number."""
    if not _is_number(value):
        raise incompatible_arguments(call, "(self: Metric, arg0: float) -> None", metric, value)
    return float(value)


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") or hasattr(value, "__index__")
