"""The row of one model version on the page, from its counters and those of the last seconds. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.texts import shown_text
from protocols.http.dashboard.windows import Reading, Window

if TYPE_CHECKING:
    from kernel.serving.catalog import IndexItem
    from kernel.serving.front_doors.model_figures import ModelFigures

_MAX_NAME = 256
MAX_REASON = 2048


class ModelRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the page shows of each model version all the time. What is 0 or empty is left out."""

    name: str
    #: Empty for a model of which nothing was loaded.
    version: str = ""
    #: As in the repository index; empty for a model that was never loaded.
    state: str = ""
    #: Requests and failures per second, with those that were refused.
    rate: float = 0.0
    failure_rate: float = 0.0
    #: Milliseconds; None without requests.
    p50_ms: float | None = None
    p99_ms: float | None = None
    #: Requests that wait, that have no final response, and how long the oldest of these has been there.
    queue: int = 0
    in_flight: int = 0
    oldest_ms: int = 0
    #: Rows per execution; None without executions.
    batch: float | None = None
    #: Instances in service, and all of them; an ensemble has none.
    serving: int = 0
    instances: int = 0
    #: Since the load.
    requests: int = 0
    failures: int = 0
    refused: int = 0
    restarts: int = 0
    ensemble: bool = False
    #: Seconds since the epoch of the last execution; None for never.
    last_s: int | None = None


def take_reading(model: ModelFigures, now_ns: int) -> Reading:
    """Return the counters of a model version now."""
    statistics = model.statistics
    return Reading(
        now_ns,
        statistics.success.count,
        statistics.fail.count,
        statistics.refused,
        statistics.inference_count,
        statistics.execution_count,
        (statistics.queue_ns, statistics.input_ns, statistics.infer_ns, statistics.output_ns),
        tuple(statistics.durations.counts),
        {rows: size.count for rows, size in statistics.batches.items()},
    )


def unchanged(model: ModelFigures, window: Window) -> bool:
    """Whether nothing was counted since the newest reading of a quiet window, and nothing is in flight."""
    statistics, newest = model.statistics, window.newest
    return (
        window.quiet
        and statistics.success.count == newest.success
        and statistics.execution_count == newest.executions
        and statistics.fail.count == newest.fail
        and statistics.refused == newest.refused
        and not model.in_flight
    )


def idle_row(item: IndexItem) -> ModelRow:
    """Return the row of what is not loaded."""
    return ModelRow(shown_text(item.name, _MAX_NAME), item.version, item.state)


def model_row(item: IndexItem, model: ModelFigures, window: Window, now_ns: int) -> ModelRow:
    """Return the row of a loaded version, whose `window` was read at `now_ns`."""
    statistics = model.statistics
    executions = window.count("executions")
    bounds = statistics.durations.bounds
    last_ns = statistics.last_inference_ns
    return ModelRow(
        shown_text(item.name, _MAX_NAME),
        item.version,
        item.state,
        rate=round(window.rate("success") + window.rate("fail") + window.rate("refused"), 2),
        failure_rate=round(window.rate("fail") + window.rate("refused"), 2),
        p50_ms=_ms(window.quantile_s(bounds, 0.5)),
        p99_ms=_ms(window.quantile_s(bounds, 0.99)),
        queue=model.queued + model.waiting,
        in_flight=model.in_flight,
        oldest_ms=_oldest_ms(model, now_ns),
        batch=round(window.count("rows") / executions, 2) if executions else None,
        serving=model.instance_count,
        instances=model.instance_total,
        requests=statistics.success.count,
        failures=statistics.fail.count,
        refused=statistics.refused,
        restarts=statistics.workers_restarted,
        ensemble=model.spec.ensemble is not None,
        last_s=last_ns // 1_000_000_000 if last_ns else None,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _oldest_ms(model: ModelFigures, now_ns: int) -> int:
    """Return the age of the oldest request."""
    return max(now_ns - model.oldest_ns, 0) // 1_000_000 if model.oldest_ns else 0
