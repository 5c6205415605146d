"""The rate limiter: which instances of all models may execute, by resources and priorities. Pure.

The rules are Triton's (core's rate_limiter.cc). An instance takes its resources when it starts a batch and gives them
back when it has executed it. Where instances wait, the one with the smallest product of executions and priority is
first. An instance that waits for a resource keeps later ones from taking it; otherwise instances that need little could
always overtake one that needs much.

Two things differ from Triton, where the first instance that waits stops all others: an instance waits only for
instances that need the same resource. And an instance that is new begins with the smallest product of the others, not
with 0, so that it does not run alone until it has caught up with servers that are up for weeks.

A `RateLimiter` decides for all models. Each of them has an `InstanceGate`, which is the `admission` of its
`InstanceSet`: the scheduler sees an instance as idle only if the limiter allows it, and nothing is dispatched ahead of
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import InvalidArgument
from kernel.serving.events import InstanceIdle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
    from kernel.serving.batch import Batch
    from kernel.serving.instance import Instance
    from kernel.serving.model import Model

#: The device of a resource that all devices share.
GLOBAL = -1


class Resource(msgspec.Struct, frozen=True):
    """A resource of one device, or of all devices together (`GLOBAL`)."""

    name: str
    device: int = GLOBAL


class InstanceNeeds(msgspec.Struct, frozen=True):
    """What an instance needs for each execution, and its weight."""

    counts: dict[Resource, int] = {}
    #: 2 executes half as often as 1 while both wait; at least 1.
    priority: int = 1


class LimitedInstance(Protocol):
    """What the limiter knows of an instance."""

    needs: InstanceNeeds
    #: How many batches it has executed. The limiter counts.
    executions: int

    def wants_to_run(self) -> bool:
        """Whether a request is queued that the instance could take now."""

    def wake(self) -> None:
        """The instance may start now: let the scheduler ask for it again."""


#: The device of a limit that each device has for itself.
PER_DEVICE = -2


class RateLimiter:
    """Gives resources to instances. They are numbers with names: an operator limits with them what runs together."""

    def __init__(self, limits: Mapping[Resource, int] | None = None) -> None:
        """`limits` are the command line's, with the device `PER_DEVICE` where none was named.

        Without them, each resource has as many as the instance needs that needs most.
        """
        self._given = dict(limits or {})
        self.needs: dict[object, tuple[InstanceNeeds, ...]] = {}
        self._limits: dict[Resource, int] = {}
        self._used: dict[Resource, int] = {}
        #: Instances that wait, in the order in which they asked; whether they have asked again since they were woken.
        self._waiting: dict[LimitedInstance, bool] = {}
        #: Products at which instances have begun; the smallest at that time, so that new ones do not overtake for long.
        self._begun_at: dict[LimitedInstance, int] = {}
        self._waking = False

    # ---- models that come and go -----------------------------------------------------------------

    def register(self, owner: object, needs: Sequence[InstanceNeeds]) -> None:
        """Note what the instances of `owner` need; replaces what it needed before.

        Raises `InvalidArgument` if one of them could never execute; then nothing has changed.
        """
        all_needs = {**self.needs, owner: tuple(needs)}
        limits = self._checked_limits(all_needs.values())
        self.needs, self._limits = all_needs, limits
        self.wake_waiting()

    def unregister(self, owner: object) -> None:
        """The instances of `owner` are gone. A second call does nothing."""
        if self.needs.pop(owner, None) is not None:
            self._limits = self._checked_limits(self.needs.values())

    def _checked_limits(self, registered: Iterable[tuple[InstanceNeeds, ...]]) -> dict[Resource, int]:
        """Return how much there is of each resource. Raises `InvalidArgument` with Triton's texts."""
        most: dict[Resource, int] = {}
        for needs in registered:
            for each in needs:
                for resource, count in each.counts.items():
                    most[resource] = max(count, most.get(resource, 0))
        for resource in most:
            if resource.device != GLOBAL and Resource(resource.name) in most:
                raise InvalidArgument(
                    f'Resource "{resource.name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
        if not self._given:
            return most
        limits: dict[Resource, int] = {}
        for resource, needed in most.items():
            limit = limits[resource] = self._given_limit(resource)
            if limit < needed:
                raise InvalidArgument(
                    f'Resource count for "{resource.name}" is limited to {limit} which will prevent scheduling of one '
                    f"or more model instances, the minimum required count is {needed}"
                )
        return limits

    def _given_limit(self, resource: Resource) -> int:
        """Return the limit of the command line. A resource that it does not name is not there at all (Triton)."""
        return max(
            (
                count
                for given, count in self._given.items()
                if given.name == resource.name
                and (resource.device == GLOBAL or given.device in (resource.device, PER_DEVICE))
            ),
            default=0,
        )

    # ---- executions ------------------------------------------------------------------------------

    def may_start(self, instance: LimitedInstance) -> bool:
        """Whether `instance` may start an execution now. If not, it waits, and is woken when it may.

        Takes nothing: `started` does, and must follow before another instance is asked about.
        """
        self._begin(instance)
        kept: dict[Resource, int] = {}  # for instances that are before this one
        rank = self._rank(instance)
        asked_before = True
        for other in self._waiting:  # in the order in which they asked
            if other is instance:
                asked_before = False
            elif self._rank(other) < rank + asked_before and other.wants_to_run():
                _add(kept, other.needs)
        if self._fits(instance.needs, kept):
            self._waiting.pop(instance, None)
            return True
        self._waiting[instance] = True
        return False

    def started(self, instance: LimitedInstance) -> None:
        """`instance` has begun an execution."""
        self._waiting.pop(instance, None)
        _add(self._used, instance.needs)

    def ended(self, instance: LimitedInstance, count: int = 1) -> None:
        """`count` executions of `instance` have ended. Call `wake_waiting` when the instance may be asked about."""
        instance.executions += count
        _add(self._used, instance.needs, -count)

    def wake_waiting(self) -> None:
        """Wake the instances that wait and may start now. One that has no request any more waits no longer."""
        if self._waking:  # an instance that was woken has ended at once
            return
        self._waking = True
        kept: dict[Resource, int] = {}  # for instances that lack something
        try:
            for instance in sorted(self._waiting, key=self._rank):
                if instance not in self._waiting:
                    continue
                if not instance.wants_to_run():
                    del self._waiting[instance]
                elif self._fits(instance.needs, kept):
                    self._waiting[instance] = False
                    instance.wake()  # it has its place in the order while it asks
                    if not self._waiting.get(instance, True):
                        del self._waiting[instance]
                else:
                    _add(kept, instance.needs)
        finally:
            self._waking = False

    def forget(self, instance: LimitedInstance) -> None:
        """`instance` takes no more batches for now: it does not wait."""
        self._waiting.pop(instance, None)
        self._begun_at.pop(instance, None)

    def _begin(self, instance: LimitedInstance) -> None:
        """Note an instance that asks for the first time."""
        if instance not in self._begun_at:
            ranks = [self._rank(other) for other in self._begun_at]
            own = instance.executions * instance.needs.priority
            self._begun_at[instance] = max(0, min(ranks, default=0) - own)

    def _rank(self, instance: LimitedInstance) -> int:
        """Return Triton's product of executions and priority; the smallest is first."""
        return self._begun_at[instance] + instance.executions * instance.needs.priority

    def _fits(self, needs: InstanceNeeds, kept: dict[Resource, int]) -> bool:
        """Whether there is enough of each resource beside what is used and kept."""
        return all(
            self._used.get(resource, 0) + kept.get(resource, 0) + count <= self._limits.get(resource, 0)
            for resource, count in needs.counts.items()
        )

    def check(self) -> None:
        """Check that no more is used than there is; for tests."""
        for resource, used in self._used.items():
            assert 0 <= used <= self._limits.get(resource, used), f"{used} of {resource} are in use"


def parse_limits(values: Iterable[str]) -> dict[Resource, int]:
    """Read the values of --rate-limit-resource, whose form was checked. Of equal ones the smallest counts (Triton)."""
    limits: dict[Resource, int] = {}
    for value in values:
        name, count, *device = value.split(":")
        resource = Resource(name, int(device[0]) if device else PER_DEVICE)
        limits[resource] = min(int(count), limits.get(resource, int(count)))
    return limits


def _add(counts: dict[Resource, int], needs: InstanceNeeds, times: int = 1) -> None:
    for resource, count in needs.counts.items():
        counts[resource] = counts.get(resource, 0) + times * count


class RateLimiting:
    """Puts models under the limiter. Implements `kernel.serving.model.ModelExtension`."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter

    async def extend(self, model: Model, folder: Path) -> None:
        """Put the instances of a model under the limiter. Raises `InvalidArgument` if one could never execute."""
        gate = InstanceGate(model, self._limiter)
        gate.change(model.config)
        model.instances.limit(gate)
        model.on_change, model.on_closed = gate.change, gate.close


class InstanceGate:
    """Asks the limiter for each batch of a model. Implements `kernel.serving.instances.InstanceAdmission`."""

    def __init__(self, model: Model, limiter: RateLimiter) -> None:
        self._model = model
        self._limiter = limiter
        #: What each group of instances needs, by the name of the group and the device.
        self._groups: dict[tuple[str, int], InstanceNeeds] = {}
        self._gated: dict[Instance, GatedInstance] = {}
        #: Executions of instances that are gone, by name: a restarted worker continues counting.
        self._former: dict[str, int] = {}
        self._closed = False

    # ---- configurations --------------------------------------------------------------------------

    def change(self, config: ModelConfig) -> None:
        """Take the needs of instances from `config` from now on. Raises `InvalidArgument`; then nothing has changed."""
        groups = {
            (group.name, device): instance_needs(group, device)
            for group in config.instance_group
            if not group.passive
            for device in (group.gpus or [0])
        }
        self._register(groups)
        self._groups = groups

    def _register(self, groups: dict[tuple[str, int], InstanceNeeds]) -> None:
        # Instances of former groups may have batches or sequences still.
        self._limiter.register(self, [*groups.values(), *(gated.needs for gated in self._gated.values())])

    def close(self) -> None:
        """The version is closed."""
        self._closed = True
        self._limiter.unregister(self)

    def _gated_for(self, instance: Instance) -> GatedInstance:
        found = self._gated.get(instance)
        if found is None:
            group = instance.name.rpartition("_")[0]
            needs = self._groups.get((group, instance.record.device_id), InstanceNeeds())
            found = self._gated[instance] = GatedInstance(
                self._model, instance, needs, self._former.pop(instance.name, 0)
            )
        return found

    # ---- kernel.serving.instances.InstanceAdmission ----------------------------------------------

    def idle_instance(self) -> Instance | None:
        """Return an instance that may start a batch now, or None. The one with the fewest executions is asked first."""
        idle = [self._gated_for(each) for each in self._model.instances.serving if is_idle(each)]
        for gated in sorted(idle, key=_product):
            if self._limiter.may_start(gated):
                return gated.instance
        return None

    def may_start(self, instance: Instance) -> bool:
        return self._limiter.may_start(self._gated_for(instance))

    def started(self, instance: Instance, batch: Batch) -> None:
        gated = self._gated_for(instance)
        self._limiter.started(gated)
        gated.numbers.add(batch.number)

    def ended(self, instance: Instance, batch: Batch) -> None:
        gated = self._gated_for(instance)
        if batch.number in gated.numbers:  # not a batch of a warm-up
            gated.numbers.discard(batch.number)
            self._limiter.ended(gated)

    def added(self, instance: Instance) -> None:
        self._gated_for(instance)

    def set_apart(self, instance: Instance) -> None:
        """The instance gets no batch from the scheduler. It keeps the resources of the batches that it finishes."""
        self._limiter.forget(self._gated_for(instance))

    def forgotten(self, instance: Instance) -> None:
        gated = self._gated.pop(instance, None)
        if gated is not None:
            self._limiter.ended(gated, len(gated.numbers))
            self._limiter.forget(gated)
            self._former[instance.name] = gated.executions
            if not self._closed and gated.needs not in self._groups.values():
                self._register(self._groups)  # it was the last that needed as much, perhaps

    def pass_on(self) -> None:
        self._limiter.wake_waiting()


class GatedInstance:
    """An instance under the limiter. Implements `LimitedInstance`."""

    def __init__(self, model: Model, instance: Instance, needs: InstanceNeeds, executions: int) -> None:
        self.instance = instance
        self.needs = needs
        self.executions = executions
        #: The numbers of its batches that have resources. Batches of a warm-up have none.
        self.numbers: set[int] = set()
        self._model = model

    def wants_to_run(self) -> bool:
        model, instance = self._model, self.instance
        return model.live.queued > 0 and instance in model.instances.serving and is_idle(instance)

    def wake(self) -> None:
        self._model.inbox.post(InstanceIdle(self.instance))


def instance_needs(group: ModelInstanceGroup, device: int) -> InstanceNeeds:
    """Return what each instance of a group on one device needs. Of a resource that is named twice, the last counts."""
    limiter = group.rate_limiter
    counts = {
        Resource(each.name, GLOBAL if getattr(each, "global") else device): each.count for each in limiter.resources
    }
    return InstanceNeeds(counts, max(1, limiter.priority))


def is_idle(instance: Instance) -> bool:
    """Whether the instance has fewer batches than its concurrency."""
    return len(instance.record.batches) < instance.record.concurrency


def _product(gated: GatedInstance) -> int:
    return gated.executions * gated.needs.priority
