"""The metrics of the response cache, by model and for the server: Triton's names, help texts and labels, and ours.

They are on the page of a server with a cache only, and a model has series only if it uses the cache (Triton).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.http.metrics.families import Summary, Value, labelled, render_summary, render_values
from protocols.http.metrics.text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.observe.cache_figures import CacheFigures
    from kernel.observe.metrics_config import MetricsConfig
    from kernel.serving.front_doors.model_figures import ModelFigures

COUNTERS = (
    Value(
        "nv_cache_num_hits_per_model",
        "Number of cache hits per model",
        lambda model: model.statistics.cache_hit.count,
    ),
    Value(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda model: model.statistics.cache_hit.ns // 1000,
    ),
    Value(
        "nv_cache_num_misses_per_model",
        "Number of cache misses per model",
        lambda model: model.statistics.cache_miss.count,
    ),
    Value(
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda model: model.statistics.cache_miss.ns // 1000,
    ),
)

SUMMARIES = (
    Summary(
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds.",
        lambda summaries: summaries.cache_hit,
    ),
    Summary(
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
        lambda summaries: summaries.cache_miss,
    ),
)


class Figure(msgspec.Struct, frozen=True):
    """A family with one value for the whole cache."""

    name: str
    help: str
    value: Callable[[CacheFigures], float]
    kind: str = "gauge"
    #: Only a cache in the memory of the server has it.
    local: bool = False


FIGURES = (
    Figure(
        "nv_cache_util",
        "Cache utilization [0.0 - 1.0]",
        lambda figures: figures.used_byte_size / figures.byte_size,
        local=True,
    ),
    Figure(
        "nv_cache_num_entries",
        "Number of responses stored in response cache",
        lambda figures: figures.entries,
        local=True,
    ),
    Figure("nv_cache_num_hits", "Number of cache hits in response cache", lambda figures: figures.hits),
    Figure("nv_cache_num_misses", "Number of cache misses in response cache", lambda figures: figures.misses),
    Figure("nv_cache_num_lookups", "Number of cache lookups in response cache", lambda figures: figures.lookups),
    Figure(
        "nv_cache_num_evictions",
        "Number of cache evictions in response cache",
        lambda figures: figures.evictions,
        local=True,
    ),
    Figure(
        "nv_cache_lookup_duration",
        "Total cache lookup duration (hit and miss), in microseconds",
        lambda figures: figures.lookup_ns // 1000,
    ),
    Figure(
        "nv_cache_insertion_duration",
        "Total cache insertion duration, in microseconds",
        lambda figures: figures.insertion_ns // 1000,
    ),
    Figure(
        "naiad_cache_failures_total",
        "Number of calls of the response cache that failed or took too long",
        lambda figures: figures.failures,
        kind="counter",
    ),
    Figure(
        "naiad_cache_not_stored_total",
        "Number of responses that were not stored in the response cache, because they are too large or it has no room",
        lambda figures: figures.not_stored,
        kind="counter",
    ),
)


def render_cache(
    models: Iterable[ModelFigures], figures: CacheFigures, config: MetricsConfig, now_ns: int
) -> list[str]:
    """Return the lines of all families."""
    series = labelled(model for model in models if model.statistics.cached)
    lines: list[str] = []
    for family in COUNTERS if config.counter_latencies else ():
        render_values(lines, family, series)
    for figure in FIGURES:
        if figures.byte_size or not figure.local:
            value = number(figure.value(figures))
            lines += (f"# HELP {figure.name} {figure.help}", f"# TYPE {figure.name} {figure.kind}")
            lines.append(f"{figure.name} {value}")
    for summary in SUMMARIES if config.summary_latencies else ():
        render_summary(lines, summary, series, config.quantiles, now_ns)
    return lines
