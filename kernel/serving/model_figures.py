"""What is known of a model version, as data: figures, Triton's statistics, metadata. Pure.

Figures are taken when they are asked for, by the metrics page, the page at / and reports. They refer to no model,
instance or request. The fields of statistics have the names and the order that
`/stats` and the gRPC message have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.observe.statistics import Duration, ResponseStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.spec import ModelSpec, TensorSpec
    from kernel.observe.execution_reports import MemoryUsage
    from kernel.observe.statistics import ModelStatistics
    from kernel.serving.model import Model


class InstanceFigures(msgspec.Struct, frozen=True):
    """One instance of a model version."""

    name: str
    #: `idle`, `busy`, `slow`, `stopped`, `lost` or `apart`.
    state: str
    #: What is wrong with it; empty if nothing is.
    trouble: str
    #: How many batches it has.
    batches: int
    #: The host that its worker runs on; "" for the machine of the server.
    host: str = ""


class ModelCounters(Protocol):
    """The counters of one model version, for those who read them all the time. Read-only."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def version_text(self) -> str: ...

    @property
    def statistics(self) -> ModelStatistics: ...


class ModelFigures(msgspec.Struct, frozen=True):
    """One model version."""

    spec: ModelSpec
    config: ModelConfig
    version: int
    version_text: str
    #: The counters of this load of the version, which go on counting. Read-only.
    statistics: ModelStatistics
    #: Requests: without a final response, queued, and dispatched ahead of time but not started.
    in_flight: int
    queued: int
    waiting: int
    #: When the oldest request was received, in monotonic nanoseconds; 0 for none.
    oldest_ns: int
    live_sequences: int
    #: Instances: in service, all with those that are lost or set apart, and those with which something is wrong.
    instance_count: int
    instance_total: int
    condition_count: int
    busy_count: int
    stopped_count: int
    #: Requests that have ended workers, and later ones that were refused (`naiad.isolate_poison`).
    poison_found: int
    poison_refused: int
    #: Whether newer files of the model could not be loaded.
    reload_failed: bool
    #: Bytes in use for large inputs.
    arena_used_byte_size: int
    #: Instance → the other host that it runs on, of those that are not on this machine.
    hosts: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.spec.name


def figures_of(model: Model) -> ModelFigures:
    """Return the figures of a model version now."""
    instances, arena, live, poison = model.instances, model.input_arena, model.live, model.poison
    oldest = next(iter(live.instance_of), None)
    conditions = instances.conditions
    return ModelFigures(
        model.spec,
        model.config,
        model.version,
        model.version_text,
        model.statistics,
        model.in_flight,
        live.queued,
        instances.waiting,
        0 if oldest is None else oldest.received_ns,
        model.live_sequences,
        instances.count,
        sum(1 for _ in instances.everywhere) + sum(each.lost for each in conditions),
        len(conditions),
        instances.busy_count,
        instances.stopped_count,
        0 if poison is None else poison.found_count,
        0 if poison is None else poison.refused_count,
        bool(model.reload_error),
        0 if arena is None else arena.allocator.used_bytes,
        {each.name: each.record.host for each in instances.everywhere if each.record.host},
    )


def instance_figures(model: Model) -> list[InstanceFigures]:
    """Return the figures of the instances of a model version now."""
    instances = model.instances
    serving, conditions = instances.serving, instances.by_instance
    found: list[InstanceFigures] = []
    for instance in (*instances.everywhere, *(each for each, state in conditions.items() if state.lost)):
        condition = conditions.get(instance)
        batches = len(instance.record.batches)
        if condition is not None:
            state = "lost" if condition.lost else "stopped" if condition.stopped else "slow"
        elif instance not in serving:
            state = "apart"
        else:
            state = "busy" if batches else "idle"
        trouble = "" if condition is None else condition.text
        found.append(InstanceFigures(instance.name, state, trouble, batches, instance.record.host))
    return found


class InferStatistics(msgspec.Struct, frozen=True):
    """Counts and durations of requests, by outcome and by stage."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class InferBatchStatistics(msgspec.Struct, frozen=True):
    """Counts and durations of the executions with one batch size, in rows."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of `model_stats`."""

    name: str
    version: str
    #: Milliseconds since the epoch, 0 for never.
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    #: Index of a response among the responses of its request → statistics.
    response_stats: dict[str, ResponseStatistics]
    batch_stats: list[InferBatchStatistics]
    #: The sums over the instances.
    memory_usage: list[MemoryUsage]
    #: Name of the instance → the memory that it uses; left out if no backend has reported any. Triton lacks it.
    instance_memory: dict[str, tuple[MemoryUsage, ...]] = {}
    #: Name of the instance → the other host that it runs on; left out if all are on this machine. Triton lacks it.
    instance_hosts: dict[str, str] = {}


def model_report(model: ModelFigures) -> ModelReport:
    """Return the current statistics of a model version."""
    counted = model.statistics
    succeeded = counted.success.count
    executed = succeeded - counted.cache_hit.count
    return ModelReport(
        name=model.name,
        version=model.version_text,
        last_inference=counted.last_inference_ns // 1_000_000,
        inference_count=counted.inference_count,
        execution_count=counted.execution_count,
        inference_stats=InferStatistics(
            success=counted.success,
            fail=counted.fail,
            queue=Duration(succeeded, counted.queue_ns),
            compute_input=Duration(executed, counted.input_ns),
            compute_infer=Duration(executed, counted.infer_ns),
            compute_output=Duration(executed, counted.output_ns),
            cache_hit=counted.cache_hit,
            cache_miss=counted.cache_miss,
        ),
        response_stats=counted.responses,
        batch_stats=[
            InferBatchStatistics(
                rows,
                Duration(size.count, size.input_ns),
                Duration(size.count, size.infer_ns),
                Duration(size.count, size.output_ns),
            )
            for rows, size in sorted(counted.batches.items())
        ],
        memory_usage=counted.memory.total(),
        instance_memory=dict(sorted(counted.memory.by_instance.items())),
        instance_hosts=model.hosts,
    )


class TensorMetadata(msgspec.Struct, frozen=True):
    """An input or output; `shape` includes the batch dimension; -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(msgspec.Struct, frozen=True):
    """The fields, in the order of the HTTP response."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def model_metadata(spec: ModelSpec, versions: Iterable[int]) -> ModelMetadata:
    """Describe a model; `versions` are the ready ones, or the requested one.

    Reshapes are not part of it. For a model without a platform, `platform` is the name of its backend.
    """
    return ModelMetadata(
        name=spec.name,
        versions=tuple(str(version) for version in versions),
        platform=spec.platform or spec.backend,
        inputs=tuple(_tensor_metadata(tensor) for tensor in spec.inputs.values()),
        outputs=tuple(_tensor_metadata(tensor) for tensor in spec.outputs.values()),
    )


def _tensor_metadata(tensor: TensorSpec) -> TensorMetadata:
    return TensorMetadata(tensor.name, tensor.datatype, tensor.shape)
