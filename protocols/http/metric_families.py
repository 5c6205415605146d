"""The metrics of models as Prometheus families: Triton's names, help texts and labels, and a few of ours.

Counters are plain integers of `ModelStatistics`; a registry is filled from them when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aioprometheus import Counter, Gauge, Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.model import Model
    from protocols.http.host_load import Memory


class Family(msgspec.Struct, frozen=True):
    """A metric with one value for each model version."""

    name: str
    help: str
    value: Callable[[Model], float]
    gauge: bool = False


FAMILIES = (
    Family(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda model: model.statistics.success.count,
    ),
    Family(
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda model: model.statistics.inference_count,
    ),
    Family(
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda model: model.statistics.execution_count,
    ),
    Family(
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda model: model.statistics.success.ns // 1000,
    ),
    Family(
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda model: model.statistics.queue.ns // 1000,
    ),
    Family(
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda model: model.statistics.compute_input.ns // 1000,
    ),
    Family(
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda model: model.statistics.compute_infer.ns // 1000,
    ),
    Family(
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda model: model.statistics.compute_output.ns // 1000,
    ),
    Family(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda model: model.statistics.pending,
        gauge=True,
    ),
    Family(
        "nv_model_load_duration_secs",
        "Model load time in seconds",
        lambda model: model.statistics.load_ns / 1e9,
        gauge=True,
    ),
    # Not of Triton, whose instances share its process.
    Family(
        "nv_model_instance_count",
        "Number of instances of the model that are alive",
        lambda model: model.instances.count,
        gauge=True,
    ),
    Family(
        "nv_worker_lost_count",
        "Number of worker processes of the model that died",
        lambda model: model.statistics.workers_lost,
    ),
)

_FAILURE = ("nv_inference_request_failure", "Number of failed inference requests, all batch sizes")


def build_registry(models: Iterable[Model], cpu_utilization: float, memory: Memory) -> Any:
    """Return an aioprometheus `Registry` of what is so now. Families are there without any model, too."""
    registry = Registry()
    labelled = [(model, _labels(model)) for model in models]
    for family in FAMILIES:
        kind = Gauge if family.gauge else Counter
        collector = kind(family.name, family.help, registry=registry)
        for model, labels in labelled:
            collector.set(labels, family.value(model))
    failure = Counter(*_FAILURE, registry=registry)
    for model, labels in labelled:
        for reason, count in model.statistics.failures.items():
            failure.set({**labels, "reason": reason}, count)
    for name, help_text, value in (
        ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", cpu_utilization),
        ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", memory.total),
        ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", memory.total - memory.available),
    ):
        Gauge(name, help_text, registry=registry).set({}, value)
    return registry


def _labels(model: Model) -> dict[str, str]:
    """Return the labels of a model version; tags of its configuration begin with an underscore (Triton)."""
    tags = {f"_{name}": _escape(value) for name, value in model.spec.metric_tags.items()}
    return {**tags, "model": _escape(model.name), "version": model.version_text}


def _escape(value: str) -> str:
    """Return a label value as the text format wants it; aioprometheus writes it as it is."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
