"""Metrics of the server, not of a model: how busy the machine is, connections, lost lines of the log.

They are in a registry of aioprometheus, written by its formatter. Further families can be added to that registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from aioprometheus import Counter, Gauge, Registry
from aioprometheus.renderer import render

from kernel.serving.front_doors.server_parts import DoorFigures, RecordFigures, RepositoryFigures, TraceFigures
from protocols.http.metrics.host_load import HostLoad

if TYPE_CHECKING:
    from kernel.options import MetricsOptions
    from kernel.serving.front_doors.interface import KernelInterface
    from kernel.serving.front_doors.traffic_control import TrafficControl

_Figures = TypeVar("_Figures")


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
        self._memory_refusals = Counter(
            "naiad_server_memory_refusals_total",
            "Number of requests that were refused because there was no memory for them",
            registry=self.registry,
        )
        self._lost_log_lines = Counter(
            "naiad_server_log_lines_lost_total",
            "Number of log lines that were dropped because nobody read the log, or could not be written",
            registry=self.registry,
        )
        self._background_failures = Counter(
            "naiad_server_background_failures_total",
            "Number of times that work in the background, such as a poll of the repositories, has ended by a bug",
            registry=self.registry,
        )
        self._last_poll = self._gauge(
            "naiad_repository_last_poll_timestamp_seconds",
            "When the model repositories were last polled without a failure, in seconds since the epoch",
        )
        self._traces = Counter(
            "naiad_traces_total", "Number of traces that were written or exported", registry=self.registry
        )
        self._lost_traces = Counter(
            "naiad_traces_lost_total",
            "Number of traces that were lost because they could not be written or exported, or too many waited",
            registry=self.registry,
        )

        self._records = Counter(
            "naiad_records_total", "Number of records of the flight recorder that were written", registry=self.registry
        )
        self._lost_records = Counter(
            "naiad_records_lost_total",
            "Number of records of the flight recorder that were lost because they could not be written, or too many "
            "waited",
            registry=self.registry,
        )
        self._add_traffic()

    def _add_traffic(self) -> None:
        """Add the families of traffic rules and rollouts."""
        self._routed = Counter(
            "naiad_traffic_requests_total",
            "Number of requests that a traffic rule has sent to a model version, by reason",
            registry=self.registry,
        )
        self._shares = self._gauge(
            "naiad_traffic_share",
            "Share of the requests without a version that a model version gets by a traffic rule [0.0 - 1.0]",
        )

        self._rollout_phase = self._gauge(
            "naiad_traffic_rollout_phase", "1 for the phase in which the last rollout of a model is"
        )
        self._rollout_events = self._gauge(
            "naiad_traffic_rollout_events",
            "Number of events that a guard of the last rollout of a model has counted for a model version, by kind",
        )

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
        self._memory_refusals.set({}, self._kernel.memory_refusals.count)
        self._lost_log_lines.set({}, self._kernel.lost_log_lines())
        repository = self._figures(RepositoryFigures)
        self._background_failures.set({}, repository.background_failures)
        if repository.polled_s is not None:
            self._last_poll.set({}, repository.polled_s)
        if self._kernel.traffic is not None:
            self._set_traffic(self._kernel.traffic)
        traces, records = self._figures(TraceFigures), self._figures(RecordFigures)
        self._traces.set({}, traces.written)
        self._lost_traces.set({}, traces.lost)
        self._records.set({}, records.written)
        self._lost_records.set({}, records.lost)
        text: bytes
        # `openmetrics` makes that format of the whole page: in that of aioprometheus, Triton's counters would get names
        # that end in `_total`.
        text, _ = render(self.registry, [])
        return text.decode()

    def _figures(self, kind: type[_Figures]) -> _Figures:
        """Return the figures of this kind; those of a part that has done nothing if the server has no such part."""
        return next(iter(self._kernel.part_figures(kind)), kind())

    def _set_traffic(self, traffic: TrafficControl) -> None:
        # Versions that have ended, or have no share any more, have no series.
        self._routed.values.clear()
        self._shares.values.clear()
        self._rollout_phase.values.clear()
        self._rollout_events.values.clear()
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

    def _gauge(self, name: str, help_text: str) -> Any:
        return Gauge(name, help_text, registry=self.registry)
