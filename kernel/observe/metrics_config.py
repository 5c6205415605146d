"""The settings of latency metrics: `--metrics-config` and a model's `model_metrics`. Pure.

Names and texts are Triton's. Settings that Triton silently ignores have no effect here either, but are logged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.generated.model_config_pb2 import ModelConfig

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
REQUEST_DURATION = "naiad_inference_request_duration_seconds"

#: Histogram family → default buckets. `model_metrics` can set other buckets for these families.
DEFAULT_BUCKETS: dict[str, tuple[float, ...]] = {
    FIRST_RESPONSE: (100, 500, 2000, 5000),
    # From a small model on the fast path to a language model that streams.
    REQUEST_DURATION: (
        0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
    ),
}  # fmt: skip

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)

_SWITCHES = ("counter_latencies", "histogram_latencies", "summary_latencies")


class MetricsConfig(msgspec.Struct, frozen=True):
    """The latency metrics that the server measures."""

    #: Cumulative durations: nv_inference_*_duration_us.
    counter_latencies: bool = True
    #: The time to the first response: nv_inference_first_response_histogram_ms.
    histogram_latencies: bool = False
    #: Quantiles of the last minute: nv_inference_*_summary_us.
    summary_latencies: bool = False
    #: The quantiles of summaries, from 0.0 to 1.0.
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES


def parse_metrics_config(settings: Iterable[str]) -> tuple[MetricsConfig, list[str]]:
    """Parse the values of --metrics-config. Returns also a log line for each value without effect.

    Raises `BadOption` if a value is not `<setting>=<value>`.
    """
    config = MetricsConfig()
    complaints: list[str] = []
    for text in settings:
        name, _, value = text.partition("=")
        if not name or not value or "," in name:
            raise BadOption(f"--metrics-config option format is <setting>=<value>. Got {text}")
        if name in _SWITCHES and value.lower() in ("true", "false"):
            config = msgspec.structs.replace(config, **{name: value.lower() == "true"})
        elif name in _SWITCHES:
            complaints.append(f"--metrics-config setting '{name}' must be true or false, '{value}' has no effect")
        elif name == "summary_quantiles":
            quantiles, wrong = _parse_quantiles(value)
            complaints += wrong
            config = msgspec.structs.replace(config, quantiles=quantiles or config.quantiles)
        else:
            known = ", ".join((*_SWITCHES, "summary_quantiles"))
            complaints.append(f"--metrics-config setting '{name}' is unknown and has no effect; settings are {known}")
    return config, complaints


def _parse_quantiles(text: str) -> tuple[tuple[float, ...], list[str]]:
    """Parse a text such as `0.5:0.05,0.9:0.01`. Returns the quantiles, and a line for each wrong one.

    The second numbers, allowed errors of the rank, are ignored: our quantiles are exact in rank.
    """
    quantiles: dict[float, None] = {}
    complaints: list[str] = []
    for pair in text.split(","):
        quantile_text, colon, error_text = pair.partition(":")
        if not colon:
            complaints.append(
                f"Invalid option: [{pair}]. No ':' delimiter found. Expected format is <quantile>:<error>"
            )
            continue
        try:
            quantile, error = float(quantile_text), float(error_text)
        except ValueError:
            complaints.append(f"Invalid option: [{pair}]. Error: stod")
            continue
        if 0 <= quantile <= 1 and math.isfinite(error):
            quantiles[quantile] = None
        else:
            complaints.append(f"Invalid option: [{pair}]. Error: a quantile must be between 0 and 1")
    return tuple(quantiles), complaints


def buckets_of(config: ModelConfig) -> tuple[dict[str, tuple[float, ...]], list[str]]:
    """Return family → buckets of a model's histograms, and a log line for each family that cannot be configured."""
    buckets = dict(DEFAULT_BUCKETS)
    complaints: list[str] = []
    for control in config.model_metrics.metric_control:
        family = control.metric_identifier.family
        if family in buckets:
            buckets[family] = tuple(control.histogram_options.buckets)
        else:
            complaints.append(
                f"Metric family '{family}' in 'metric_identifier' is not a customizable metric in Triton core."
            )
    return buckets, complaints
