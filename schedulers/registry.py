"""Which scheduler a model has: one of ours by the configuration, or one of an installed package by its name.

A package adds a scheduler with an entry point of the group `naiad.schedulers`; a model chooses it with the parameter
`naiad.scheduler` (docs/schedulers.md).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, cast

from kernel.errors import InternalError
from kernel.extensions import SCHEDULERS, extension
from schedulers.direct import direct
from schedulers.dynamic import dynamic

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.events import Event
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import SchedulerFactory


def choose_scheduler(
    spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock, *, caller: Kernel | None = None
) -> Coroutine[int | None, Event, None]:
    """Return the scheduler coroutine that a model's configuration asks for. Raises `ServingError`.

    Ensembles submit the requests of their steps through `caller`.
    """
    if spec.ensemble is not None:
        from schedulers.ensemble.scheduler import ensemble  # many servers have no ensemble

        assert caller is not None, f"ensemble '{spec.name}' cannot call its models"
        return ensemble(spec, inbox, instances, clock, caller=caller)
    coroutine = scheduler_for(spec)(spec, inbox, instances, clock)
    if not inspect.iscoroutine(coroutine):
        found = type(coroutine).__name__
        raise InternalError(f"scheduler '{spec.scheduler}' must be an `async def` function, its call returned {found}")
    return coroutine


def scheduler_for(spec: ModelSpec) -> SchedulerFactory:
    """Return the scheduler function that a model's configuration asks for. Raises `ServingError`."""
    if spec.scheduler:
        return _installed_scheduler(spec.scheduler)
    if spec.sequence_batching is not None:
        from schedulers.sequence import sequence  # as above

        return sequence
    if spec.dynamic_batching is not None or spec.fair is not None:
        return dynamic
    return direct


def _installed_scheduler(name: str) -> SchedulerFactory:
    found = extension(SCHEDULERS, name)
    if not callable(found):
        raise InternalError(f"scheduler '{name}' must be an `async def` function, it is a {type(found).__name__}")
    return cast("SchedulerFactory", found)
