"""The figures of a model version as data: for the metrics page, the page at / and reports.

Figures are taken when they are asked for. They refer to no model, instance or request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.spec import ModelSpec
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
        found.append(InstanceFigures(instance.name, state, "" if condition is None else condition.text, batches))
    return found
