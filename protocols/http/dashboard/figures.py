"""What the page shows: a row for each model version, more of the one that a viewer has chosen, the server. Pure.

All of it comes from counters, and from what they have counted in the last seconds (`Window`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import ServingError
from kernel.server_parts import DoorFigures, DoorProcessList, RepositoryFigures
from kernel.serving.catalog import ModelState
from kernel.texts import SERVER_PATHS, shown_text
from protocols.http.dashboard.windows import LanguageReading, Reading, Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kernel.observe.execution_reports import InstanceMemory
    from kernel.observe.generation_statistics import GenerationStatistics
    from kernel.observe.recent_requests import RecentOfModel, RecentRequest
    from kernel.serving.catalog import IndexItem
    from kernel.serving.interface import KernelInterface
    from kernel.serving.model_figures import InstanceFigures, ModelFigures
    from protocols.http.dashboard.windows import LanguageWindow
    from shm.region import Region

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


#: What the page shows of the report of `TrafficControl`: no ids, and no texts of outputs.
_TRAFFIC = ("source", "targets", "rollout", "shadow", "feedback")


def traffic_of(kernel: KernelInterface, name: str) -> dict[str, Any] | None:
    """Return what the page shows of the traffic of a model; None if it has no rule and never had one."""
    if kernel.traffic is None:
        return None
    try:
        report = kernel.traffic.report(name)
    except ServingError:
        return None
    if not any(report.get(part) for part in _TRAFFIC[1:]):
        return None
    found = {part: report[part] for part in _TRAFFIC}
    if found["rollout"] is not None:
        reason = shown_text(SERVER_PATHS.hidden_in(found["rollout"]["reason"]), MAX_REASON)
        found["rollout"] = {**found["rollout"], "reason": reason, "by": ""}
    if found["shadow"] is not None:
        found["shadow"] = {key: value for key, value in found["shadow"].items() if key != "worst"}
    return found


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


# ---- the chosen version ----------------------------------------------------------------------


_MAX_TEXT = 512


class InstanceRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One instance, with its worker."""

    name: str
    #: `idle`, `busy`, `apart` (it warms up, or finishes its last batches), `stopped`, `slow`, `lost`.
    state: str
    #: What is wrong with it.
    condition: str = ""
    batches: int = 0
    #: 0 if the worker is not on this machine, or there is none.
    pid: int = 0
    #: Processors that the worker keeps busy: 1.0 is one. None if not known.
    cpu: float | None = None
    byte_size: int = 0
    restarts: int = 0
    device_byte_size: int = 0
    #: "" for the machine of the server.
    host: str = ""


class ShownRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A slow or failed request. Times are in milliseconds; stages count from its reception."""

    number: int
    version: int
    id: str
    ago_ms: int
    total_ms: float
    stages: list[tuple[str, float, float]]
    rows: int
    batch_rows: int = 0
    batch_requests: int = 0
    closed_by: str = ""
    instance: str = ""
    error: str = ""
    reason: str = ""
    repeats: int = 0


class RecentPart(msgspec.Struct, frozen=True):
    """The last slow and failed requests of the models with this name, newest first."""

    slow: list[ShownRequest]
    failed: list[ShownRequest]


class LanguageRow(msgspec.Struct, frozen=True):
    """The text that a model version has generated over OpenAI's API: in the last seconds, now, and in all."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    #: Milliseconds to the first token, and between tokens; None without any.
    first_p50_ms: float | None
    first_p99_ms: float | None
    pause_p50_ms: float | None
    pause_p99_ms: float | None
    open_streams: int
    tokens: int
    prompt_tokens: int
    cancelled: int


class ModelDetail(msgspec.Struct, frozen=True):
    """One version. What the page's form needs to know of its protocol is here, the tensors are in its metadata."""

    name: str
    version: str
    decoupled: bool
    sequences: bool
    max_batch_size: int
    backend: str
    #: Failures since the load by reason, and requests that were refused.
    failures: dict[str, int]
    refused: int
    #: Mean durations of the last seconds in milliseconds: queue, input, inference, output; None without requests.
    stages_ms: list[float] | None
    #: Rows and number of the executions of the last seconds.
    batches: list[tuple[int, int]]
    instances: list[InstanceRow]
    slow_ms: float | None
    load_ms: int
    #: None for a model of which no text was asked over OpenAI's API.
    language: LanguageRow | None


def take_language_reading(statistics: GenerationStatistics, now_ns: int) -> LanguageReading:
    """Return the counters of the text that a model version has generated, now."""
    return LanguageReading(
        now_ns,
        statistics.generation_tokens,
        statistics.prompt_tokens,
        tuple(statistics.first_token.counts),
        tuple(statistics.inter_token.counts),
    )


def language_row(statistics: GenerationStatistics, window: LanguageWindow) -> LanguageRow:
    """Return what is shown of the text that a model version has generated."""
    first, pause = statistics.first_token.bounds, statistics.inter_token.bounds
    return LanguageRow(
        window.rate("generation_tokens"),
        window.rate("prompt_tokens"),
        window.quantile_ms("first_tokens", first, 0.5),
        window.quantile_ms("first_tokens", first, 0.99),
        window.quantile_ms("inter_tokens", pause, 0.5),
        window.quantile_ms("inter_tokens", pause, 0.99),
        statistics.open_streams,
        statistics.generation_tokens,
        statistics.prompt_tokens,
        statistics.cancelled,
    )


def model_detail(
    model: ModelFigures,
    instances: Iterable[InstanceFigures],
    window: Window,
    loads: Mapping[int, tuple[float | None, int]],
    language: LanguageRow | None = None,
) -> ModelDetail:
    """Return the detail of a loaded version with its instances; `loads` is `ProcessLoads.found`."""
    spec, statistics = model.spec, model.statistics
    return ModelDetail(
        spec.name,
        model.version_text,
        spec.decoupled,
        spec.sequence_batching is not None,
        spec.max_batch_size,
        spec.platform or spec.backend,
        dict(statistics.failures),
        statistics.refused,
        window.stages_ms(),
        window.batches(),
        [_instance(each, statistics.memory, loads) for each in instances],
        statistics.slow_ns / 1e6 if statistics.recent is not None else None,
        statistics.load_ns // 1_000_000,
        language,
    )


def _instance(
    instance: InstanceFigures, memory: InstanceMemory, loads: Mapping[int, tuple[float | None, int]]
) -> InstanceRow:
    name = instance.name
    pid = memory.pids.get(name, 0)
    cpu, byte_size = loads.get(pid, (None, 0))
    return InstanceRow(
        shown_text(name, _MAX_TEXT),
        instance.state,
        shown_text(SERVER_PATHS.hidden_in(instance.trouble), _MAX_TEXT),
        instance.batches,
        pid,
        cpu,
        byte_size,
        max(memory.starts.get(name, 1) - 1, 0),
        sum(use.byte_size for use in memory.by_instance.get(name, ()) if use.type != "CPU"),
        shown_text(instance.host, _MAX_TEXT),
    )


def recent_part(recent: RecentOfModel, now_ns: int) -> RecentPart:
    """Return the requests as they are shown at `now_ns`."""
    return RecentPart(
        [_shown(each, now_ns) for each in reversed(recent.slow)],
        [_shown(each, now_ns) for each in reversed(recent.failed)],
    )


def _shown(request: RecentRequest, now_ns: int) -> ShownRequest:
    return ShownRequest(
        request.number,
        request.version,
        request.request_id,
        max(now_ns - request.ended_ns, 0) // 1_000_000,
        _ms_from_ns(request.total_ns),
        [(name, _ms_from_ns(begin), _ms_from_ns(end)) for name, begin, end in request.stages],
        request.rows,
        request.batch_rows,
        request.batch_requests,
        request.closed_by,
        shown_text(request.instance, _MAX_TEXT),
        request.error,
        request.reason,
        request.repeats,
    )


def _ms_from_ns(ns: int) -> float:
    return round(ns / 1e6, 4)


# ---- the server ------------------------------------------------------------------------------


#: The most bytes of what is wrong with the repositories.
_MAX_TROUBLE = 1024


class ServerRow(msgspec.Struct, frozen=True):
    """What the page shows of the server."""

    #: `starting`, `ready`, `degraded` (a model that should be ready is not), `stopping`, `failed`.
    state: str
    rate: float
    failure_rate: float
    queue: int
    in_flight: int
    models: int
    ready_models: int
    instances: int
    restarts: int
    #: Tensors of all requests, and what they may take, in bytes.
    tensor_byte_size: int
    tensor_limit: int
    regions: int
    region_byte_size: int
    connections: dict[str, int]
    #: Of the kernel process: processors that it keeps busy (None if not known yet), and its memory.
    cpu: float | None
    byte_size: int
    lost_log_lines: int
    #: How much work in the background has ended by an exception.
    background_failures: int
    #: What is wrong with the polls of the repositories, in a sentence; empty if nothing is.
    repository_trouble: str
    #: None if no front door has a process of its own.
    front_doors: DoorRows | None


class DoorRow(msgspec.Struct, frozen=True):
    """A front door in a process of its own."""

    number: int
    ready: bool
    #: 0 while none is there.
    pid: int
    #: Processors that it keeps busy (None if not known yet), and its memory.
    cpu: float | None
    byte_size: int
    connections: int
    #: Inference requests since the server started.
    requests: int


class DoorRows(msgspec.Struct, frozen=True):
    """All front doors in processes of their own."""

    doors: list[DoorRow]
    #: How many have ended and were started again.
    restarts: int


class RegionRow(msgspec.Struct, frozen=True):
    """A region that a client has registered."""

    name: str
    #: `system` or `cuda`.
    kind: str
    key: str
    byte_size: int
    #: Uses by requests that are not over.
    leases: int


class ServerFigures:
    """Sums over the rows of one snapshot."""

    def __init__(self) -> None:
        self.rate = self.failure_rate = 0.0
        self.queue = self.in_flight = self.models = self.ready_models = self.instances = self.restarts = 0

    def add(self, state: str, row: ModelRow | None) -> None:
        """Add the row of a model version that is in `state`."""
        self.models += bool(state)
        self.ready_models += state == ModelState.READY.value
        if row is not None:
            self.rate += row.rate
            self.failure_rate += row.failure_rate
            self.queue += row.queue
            self.in_flight += row.in_flight
            self.instances += row.serving
            self.restarts += row.restarts


def door_rows(kernel: KernelInterface, loads: Mapping[int, tuple[float | None, int]]) -> DoorRows | None:
    """Return the front doors in processes of their own, with what each uses (`ProcessLoads.found`)."""
    found = next(iter(kernel.part_figures(DoorProcessList)), None)
    if found is None:
        return None
    rows = [
        DoorRow(door.number, door.ready, door.pid, *loads.get(door.pid, (None, 0)), door.connections, door.requests)
        for door in found.doors
    ]
    return DoorRows(rows, found.restarts)


def server_figures(
    kernel: KernelInterface, sums: ServerFigures, loads: Mapping[int, tuple[float | None, int]]
) -> ServerRow:
    """Return the figures now; `loads` has what this process and the front doors use."""
    regions = kernel.regions.all()
    cpu, byte_size = loads.get(os.getpid(), (None, 0))
    repository = next(iter(kernel.part_figures(RepositoryFigures)), RepositoryFigures())
    return ServerRow(
        _state(kernel),
        round(sums.rate, 2),
        round(sums.failure_rate, 2),
        sums.queue,
        sums.in_flight,
        sums.models,
        sums.ready_models,
        sums.instances,
        sums.restarts,
        kernel.budget.used_byte_size,
        kernel.budget.limit_byte_size,
        len(regions),
        sum(region.byte_size for region in regions),
        {door.protocol: door.connections for door in kernel.part_figures(DoorFigures)},
        cpu,
        byte_size,
        kernel.lost_log_lines(),
        repository.background_failures,
        shown_text(SERVER_PATHS.hidden_in(repository.trouble), _MAX_TROUBLE),
        door_rows(kernel, loads),
    )


def region_rows(regions: Iterable[Region]) -> list[RegionRow]:
    """Return the regions in the order of their names."""
    rows = [
        RegionRow(
            shown_text(region.name, _MAX_NAME),
            region.kind.value,
            shown_text(region.key, _MAX_NAME),
            region.byte_size,
            region.lease_count,
        )
        for region in regions
    ]
    return sorted(rows, key=lambda row: row.name)


def _state(kernel: KernelInterface) -> str:
    if kernel.stopping:
        return "stopping"
    if kernel.start_failed:
        return "failed"
    if kernel.starting:
        return "starting"
    return "ready" if kernel.catalog.all_ready() else "degraded"
