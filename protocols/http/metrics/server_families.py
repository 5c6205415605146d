"""Metrics of the server and not of one model: its load, its GPUs, its response cache, and the memory of its workers.

`ServerMetrics` (load, connections, lost lines of the log, traffic rules) has a registry of aioprometheus, written by
its formatter; further families can be added to that registry. The others are functions that return lines:

- GPUs: Triton's names, help texts and labels (core/src/metrics.cc), only for servers that have GPUs.
- The response cache, by model and for the server: Triton's names and ours. They are on the page of a server with a
  cache only, and a model has series only if it uses the cache (Triton).
- The memory of model instances: what backends report, and what the system knows of worker processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from aioprometheus import Counter, Gauge, Registry
from aioprometheus.renderer import render

from kernel.server_parts import (
    DoorFigures,
    DoorProcessList,
    LauncherFigures,
    RecordFigures,
    RepositoryFigures,
    TraceFigures,
)
from protocols.http.metrics.formats import head, label_text, number
from protocols.http.metrics.model_families import Summary, Value, labelled, labels_of, render_summary, render_values
from protocols.http.metrics.proc import HostLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.observe.gpu_figures import GpuFigureReader, GpuFigures
    from kernel.observe.metrics_config import MetricsConfig
    from kernel.options import MetricsOptions
    from kernel.serving.interface import CacheFigures, KernelInterface, TrafficControl
    from kernel.serving.model_figures import ModelFigures

_Figures = TypeVar("_Figures")


def _figures(kernel: KernelInterface, kind: type[_Figures]) -> _Figures:
    """Return the figures of this kind; if the server has no such part, of one that has done nothing."""
    return next(iter(kernel.part_figures(kind)), kind())


#: Families with one value for the whole server; a value that is None is not known.
_OF_SERVER: tuple[tuple[type[Counter | Gauge], str, str, Callable[[KernelInterface], float | None]], ...] = (
    (
        Counter,
        "naiad_server_memory_refusals_total",
        "Number of requests that were refused because there was no memory for them",
        lambda kernel: kernel.memory_refusals.count + _figures(kernel, DoorProcessList).memory_refusals,
    ),
    (
        Counter,
        "naiad_server_log_lines_lost_total",
        "Number of log lines that were dropped because nobody read the log, or could not be written",
        lambda kernel: kernel.lost_log_lines(),
    ),
    (
        Counter,
        "naiad_server_background_failures_total",
        "Number of times that work in the background, such as a poll of the repositories, has ended by a bug",
        lambda kernel: _figures(kernel, RepositoryFigures).background_failures,
    ),
    (
        Gauge,
        "naiad_repository_last_poll_timestamp_seconds",
        "When the model repositories were last polled without a failure, in seconds since the epoch",
        lambda kernel: _figures(kernel, RepositoryFigures).polled_s,
    ),
    (
        Counter,
        "naiad_traces_total",
        "Number of traces that were written or exported",
        lambda kernel: _figures(kernel, TraceFigures).written,
    ),
    (
        Counter,
        "naiad_traces_lost_total",
        "Number of traces that were lost because they could not be written or exported, or too many waited",
        lambda kernel: _figures(kernel, TraceFigures).lost,
    ),
    (
        Counter,
        "naiad_records_total",
        "Number of records of the flight recorder that were written",
        lambda kernel: _figures(kernel, RecordFigures).written,
    ),
    (
        Counter,
        "naiad_records_lost_total",
        "Number of records of the flight recorder that were lost because they could not be written, or too many waited",
        lambda kernel: _figures(kernel, RecordFigures).lost,
    ),
)


class ServerMetrics:
    """Reads the present values at each scrape."""

    def __init__(self, kernel: KernelInterface, options: MetricsOptions, now_ns: int) -> None:
        self.registry: Any = Registry()
        self._kernel = kernel
        self._load = HostLoad(options.interval_ms, now_ns) if options.allow_cpu_metrics else None
        if self._load is not None:
            self._utilization = self._gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]")
            self._memory_total = self._gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes")
            self._memory_used = self._gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes")
        self._connections = self._gauge("naiad_server_open_connections", "Number of open connections of clients")
        self._expiry = self._gauge(
            "naiad_server_certificate_expiry_timestamp_seconds",
            "When the TLS certificate of a protocol expires, in seconds since the epoch",
        )
        self._whole = [(kind(name, help, registry=self.registry), value) for kind, name, help, value in _OF_SERVER]
        self._traffic_families: list[Any] = []
        self._add_traffic()
        self._doors = DoorProcessMetrics(self.registry) if kernel.part_figures(DoorProcessList) else None
        self._launchers = LauncherMetrics(self.registry) if kernel.part_figures(LauncherFigures) else None

    def _add_traffic(self) -> None:
        """Add the families of traffic rules and rollouts."""
        self._routed = self._of_traffic(
            Counter,
            "requests_total",
            "Number of requests that a traffic rule has sent to a model version, by reason",
        )
        self._shares = self._of_traffic(
            Gauge,
            "share",
            "Share of the requests without a version that a model version gets by a traffic rule [0.0 - 1.0]",
        )
        self._rewards = self._of_traffic(
            Counter,
            "rewards_total",
            "Number of rewards that clients have reported for requests of a model version",
        )
        self._reward_sum = self._of_traffic(
            Gauge,
            "reward_sum",
            "Sum of the rewards that clients have reported for requests of a model version",
        )
        self._shadow_pairs = self._of_traffic(
            Counter,
            "shadow_pairs_total",
            "Number of pairs of responses of a model's shadow that were compared, by result",
        )
        self._shadow_dropped = self._of_traffic(
            Counter,
            "shadow_dropped_total",
            "Number of requests that were chosen for a model's shadow and not compared, by reason",
        )
        self._shadow_differences = self._of_traffic(
            Counter,
            "shadow_differences_total",
            "Number of outputs that differed between a model's versions, by kind",
        )
        self._shadow_distance = self._of_traffic(
            Gauge,
            "shadow_distance",
            "Quantile of the distance of an output between a model's versions; up to 1 is within the tolerance",
        )
        self._rollout_phase = self._of_traffic(
            Gauge,
            "rollout_phase",
            "1 for the phase in which the last rollout of a model is",
        )
        self._rollout_events = self._of_traffic(
            Gauge,
            "rollout_events",
            "Number of events that a guard of the last rollout of a model has counted for a model version, by kind",
        )

    def _of_traffic(self, kind: type[Counter | Gauge], name: str, help_text: str) -> Any:
        family = kind(f"naiad_traffic_{name}", help_text, registry=self.registry)
        self._traffic_families.append(family)
        return family

    def render(self, now_ns: int) -> str:
        """Return the lines in Prometheus' text format, each with its end."""
        if self._load is not None:
            memory = self._load.memory()
            self._utilization.set({}, self._load.utilization(now_ns))
            self._memory_total.set({}, memory.total)
            self._memory_used.set({}, memory.total - memory.available)
        for door in self._kernel.part_figures(DoorFigures):
            self._connections.set({"protocol": door.protocol}, door.connections)
            if door.certificate_expiry_s is not None:
                self._expiry.set({"protocol": door.protocol}, door.certificate_expiry_s)
        for family, value in self._whole:
            if (found := value(self._kernel)) is not None:
                family.set({}, found)
        if self._doors is not None:
            self._doors.set(_figures(self._kernel, DoorProcessList))
        if self._launchers is not None:
            self._launchers.set(self._kernel.part_figures(LauncherFigures))
        if self._kernel.traffic is not None:
            self._set_traffic(self._kernel.traffic)
        text: bytes
        # `to_openmetrics` makes that format of the whole page: aioprometheus would add `_total` to counters' names.
        text, _ = render(self.registry, [])
        return text.decode()

    def _set_traffic(self, traffic: TrafficControl) -> None:
        for family in self._traffic_families:  # versions that have ended, or have no share any more, have no series
            family.values.clear()
        self._set_shadows(traffic)
        for rewards in traffic.rewards():
            labels = {"model": rewards.model, "version": str(rewards.version)}
            self._rewards.set(labels, rewards.count)
            self._reward_sum.set(labels, rewards.sum)
        for rollout in traffic.rollout_figures():
            self._rollout_phase.set({"model": rollout.model, "phase": rollout.phase}, 1)
            for guard, counts in rollout.guards.items():
                for side, version in (("candidate", rollout.candidate), ("stable", rollout.stable)):
                    labels = {"model": rollout.model, "version": str(version), "guard": guard}
                    self._rollout_events.set({**labels, "kind": "all"}, counts[side])
                    self._rollout_events.set({**labels, "kind": "bad"}, counts[f"{side}_bad"])
        for routed in traffic.routed():
            labels = {"model": routed.model, "version": str(routed.version), "by": routed.reason}
            self._routed.set(labels, routed.count)
        for name, shares in traffic.shares().items():
            for target in shares:
                labels = {"model": name, "target": target.model, "version": target.version}
                self._shares.set(labels, target.share)

    def _set_shadows(self, traffic: TrafficControl) -> None:
        for shadow in traffic.shadow_figures():
            labels = {"model": shadow.model, "target": shadow.target}
            self._shadow_pairs.set({**labels, "result": "equal"}, shadow.pairs - shadow.differing)
            self._shadow_pairs.set({**labels, "result": "different"}, shadow.differing)
            for reason, count in {"too many wait": 0, **shadow.dropped}.items():
                self._shadow_dropped.set({**labels, "reason": reason}, count)
            for output, kinds in shadow.outputs.items():
                for kind, count in {"values": 0, **kinds}.items():
                    self._shadow_differences.set({**labels, "output": output, "kind": kind}, count)
            for output, quantiles in shadow.distances.items():
                for quantile, value in quantiles.items():
                    self._shadow_distance.set({**labels, "output": output, "quantile": f"0.{quantile[1:]}"}, value)

    def _gauge(self, name: str, help_text: str) -> Any:
        return Gauge(name, help_text, registry=self.registry)


class DoorProcessMetrics:
    """The families of front doors in processes of their own: only for servers with such."""

    def __init__(self, registry: Any) -> None:
        def family(kind: type[Counter | Gauge], name: str, help_text: str) -> Any:
            return kind(f"naiad_front_door_{name}", help_text, registry=registry)

        self._restarts = family(
            Counter, "restarts_total", "Number of times that the process of a front door was lost and started again"
        )
        self._ready = family(Gauge, "ready", "Whether the process of a front door takes connections")
        self._connections = family(Gauge, "connections", "Number of open connections of the process of a front door")
        self._requests = family(
            Counter, "requests_total", "Number of inference requests from the process of a front door"
        )
        self._memory = family(
            Gauge, "memory_granted_bytes", "Memory of the server that the process of a front door may use for tensors"
        )

    def set(self, figures: DoorProcessList) -> None:
        """Take the present values."""
        self._restarts.set({}, figures.restarts)
        for door in figures.doors:
            labels = {"door": str(door.number)}
            self._ready.set(labels, int(door.ready))
            self._connections.set(labels, door.connections)
            self._requests.set(labels, door.requests)
            self._memory.set(labels, door.granted_byte_size)


class LauncherMetrics:
    """The families of launchers for other hosts: only for servers with such."""

    def __init__(self, registry: Any) -> None:
        self._up = Gauge("naiad_launcher_up", "Whether a launcher can start workers on other hosts", registry=registry)
        self._pending = Gauge(
            "naiad_launcher_pending_workers", "Number of workers that wait for room on another host", registry=registry
        )
        self._workers = Gauge(
            "naiad_launcher_workers", "Number of workers that a launcher has on another host", registry=registry
        )
        self._hosts: dict[str, set[str]] = {}

    def set(self, launchers: Iterable[LauncherFigures]) -> None:
        """Take the present values."""
        for figures in launchers:
            labels = {"launcher": figures.launcher}
            self._up.set(labels, int(figures.up))
            self._pending.set(labels, figures.pending)
            for host in {*figures.workers, *self._hosts.setdefault(figures.launcher, set())}:
                self._hosts[figures.launcher].add(host)  # one that is gone has no workers
                self._workers.set({**labels, "node": host}, figures.workers.get(host, 0))


# ---- GPUs ------------------------------------------------------------------------------------


GPU_FAMILIES: tuple[Value[GpuFigures], ...] = (
    Value("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", lambda gpu: gpu.utilization, "gauge"),
    Value("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", lambda gpu: gpu.total_byte_size, "gauge"),
    Value("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", lambda gpu: gpu.used_byte_size, "gauge"),
    Value("nv_gpu_power_usage", "GPU power usage in watts", lambda gpu: gpu.power_w, "gauge"),
    Value("nv_gpu_power_limit", "GPU power management limit in watts", lambda gpu: gpu.power_limit_w, "gauge"),
    Value(
        "nv_energy_consumption",
        "GPU energy consumption in joules since the Triton Server started",
        lambda gpu: gpu.energy_j,
    ),
)


def render_gpus(reader: GpuFigureReader | None) -> list[str]:
    """Return the lines of all families; of a server without a GPU only pinned memory, which it has none of."""
    lines: list[str] = []
    figures = () if reader is None else reader.figures
    pinned = (0, 0) if reader is None or not figures else (reader.pinned.byte_size, reader.pinned.used_byte_size)
    for family in GPU_FAMILIES if figures else ():
        lines += head(family.name, family.help, family.kind)
        for gpu in figures:
            value = family.value(gpu)
            if value is not None:
                lines.append(f'{family.name}{{gpu_uuid="{gpu.uuid}"}} {number(value)}')
    for name, what, byte_size in (
        ("nv_pinned_memory_pool_total_bytes", "total", pinned[0]),
        ("nv_pinned_memory_pool_used_bytes", "used", pinned[1]),
    ):
        lines += [*head(name, f"Pinned memory pool {what} memory size, in bytes", "gauge"), f"{name} {byte_size}"]
    return lines


# ---- the response cache ----------------------------------------------------------------------


CACHE_COUNTERS: tuple[Value[ModelFigures], ...] = (
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

CACHE_SUMMARIES = (
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


#: Some are only for a cache in the memory of the server, which has a `byte_size`.
CACHE_FIGURES: tuple[Value[CacheFigures], ...] = (
    Value(
        "nv_cache_util",
        "Cache utilization [0.0 - 1.0]",
        lambda figures: figures.used_byte_size / figures.byte_size if figures.byte_size else None,
        "gauge",
    ),
    Value(
        "nv_cache_num_entries",
        "Number of responses stored in response cache",
        lambda figures: figures.entries if figures.byte_size else None,
        "gauge",
    ),
    Value("nv_cache_num_hits", "Number of cache hits in response cache", lambda figures: figures.hits, "gauge"),
    Value("nv_cache_num_misses", "Number of cache misses in response cache", lambda figures: figures.misses, "gauge"),
    Value(
        "nv_cache_num_lookups", "Number of cache lookups in response cache", lambda figures: figures.lookups, "gauge"
    ),
    Value(
        "nv_cache_num_evictions",
        "Number of cache evictions in response cache",
        lambda figures: figures.evictions if figures.byte_size else None,
        "gauge",
    ),
    Value(
        "nv_cache_lookup_duration",
        "Total cache lookup duration (hit and miss), in microseconds",
        lambda figures: figures.lookup_ns // 1000,
        "gauge",
    ),
    Value(
        "nv_cache_insertion_duration",
        "Total cache insertion duration, in microseconds",
        lambda figures: figures.insertion_ns // 1000,
        "gauge",
    ),
    Value(
        "naiad_cache_failures_total",
        "Number of calls of the response cache that failed or took too long",
        lambda figures: figures.failures,
    ),
    Value(
        "naiad_cache_not_stored_total",
        "Number of responses that were not stored in the response cache, because they are too large or it has no room",
        lambda figures: figures.not_stored,
    ),
)


def render_cache(
    models: Iterable[ModelFigures], figures: CacheFigures, config: MetricsConfig, now_ns: int
) -> list[str]:
    """Return the lines of all families."""
    series = labelled(model for model in models if model.statistics.cached)
    lines: list[str] = []
    for family in CACHE_COUNTERS if config.counter_latencies else ():
        render_values(lines, family, series)
    for figure in CACHE_FIGURES:
        if (value := figure.value(figures)) is not None:
            lines += (*head(figure.name, figure.help, figure.kind), f"{figure.name} {number(value)}")
    for summary in CACHE_SUMMARIES if config.summary_latencies else ():
        render_summary(lines, summary, series, config.quantiles, now_ns)
    return lines


# ---- the memory of instances -----------------------------------------------------------------


_REPORTED, _MEASURED = "naiad_model_instance_memory_bytes", "naiad_worker_memory_bytes"


def render_memory(models: Iterable[ModelFigures], byte_sizes: dict[int, int]) -> list[str]:
    """Return the lines of both families, with `byte_sizes` by process id."""
    reported = head(_REPORTED, "Bytes of memory that a model instance uses, as its backend reports it", "gauge")
    measured = head(
        _MEASURED, "Bytes of memory that the process of a model instance uses, without files and shared memory", "gauge"
    )
    for model in models:
        memory = model.statistics.memory
        if not memory.pids and not memory.by_instance:
            continue
        labels = labels_of(model)
        for instance, uses in sorted(memory.by_instance.items()):
            for use in uses:
                text = label_text({**labels, "instance": instance, "kind": use.type, "device": str(use.id)})
                reported.append(f"{_REPORTED}{{{text}}} {use.byte_size}")
        for instance, pid in sorted(memory.pids.items()):
            if byte_size := byte_sizes.get(pid, 0):
                measured.append(f"{_MEASURED}{{{label_text({**labels, 'instance': instance})}}} {byte_size}")
    return [*reported, *measured]
