"""Statistics of a model version in the format of Triton's statistics extension, for HTTP and gRPC. Pure.

Field names and their order are those of the JSON of `/stats` and of the gRPC message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.observe.statistics import Duration, ResponseStatistics

if TYPE_CHECKING:
    from kernel.observe.reporting.instance_memory import MemoryUsage
    from kernel.serving.front_doors.model_figures import ModelFigures


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
    )
