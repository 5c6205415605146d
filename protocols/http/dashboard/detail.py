"""What the page shows of the one model version that its viewer has chosen. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.server_paths import SERVER_PATHS
from kernel.texts import shown_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kernel.observe.recent.recent_requests import RecentOfModel, RecentRequest
    from kernel.observe.reporting.instance_memory import InstanceMemory
    from kernel.serving.front_doors.model_figures import InstanceFigures, ModelFigures
    from protocols.http.dashboard.windows import Window

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


class ShownRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A slow or failed request. Times are in milliseconds, those of stages since its reception."""

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


def model_detail(
    model: ModelFigures,
    instances: Iterable[InstanceFigures],
    window: Window,
    loads: Mapping[int, tuple[float | None, int]],
) -> ModelDetail:
    """Return the detail of a loaded version with its instances; `loads` are those of `ProcessLoads.found`."""
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
        _ms(request.total_ns),
        [(name, _ms(begin), _ms(end)) for name, begin, end in request.stages],
        request.rows,
        request.batch_rows,
        request.batch_requests,
        request.closed_by,
        shown_text(request.instance, _MAX_TEXT),
        request.error,
        request.reason,
        request.repeats,
    )


def _ms(ns: int) -> float:
    return round(ns / 1e6, 4)
