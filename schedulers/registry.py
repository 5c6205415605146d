"""Which scheduler a model has: one of ours by the configuration, or one of an installed package by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedulers.direct import direct
from schedulers.dynamic.scheduler import dynamic

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.events import Event
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.model import SchedulerFactory


def choose_scheduler(
    spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock
) -> Coroutine[int | None, Event, None]:
    """Return the scheduler coroutine that a model's configuration asks for."""
    return scheduler_for(spec)(spec, inbox, instances, clock)


def scheduler_for(spec: ModelSpec) -> SchedulerFactory:
    """Return the scheduler function that a model's configuration asks for."""
    if spec.dynamic_batching is not None:
        return dynamic
    return direct
