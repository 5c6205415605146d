"""The instances of a model under the rate limiter: the scheduler sees one as idle only if the limiter allows it.

The gate is the `admission` of one `InstanceSet`, so schedulers do not depend on it. Under the limiter nothing is
dispatched ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.limiting.limiter import GLOBAL, InstanceNeeds, Resource
from kernel.serving.events import InstanceIdle

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
    from kernel.limiting.limiter import Limiter
    from kernel.serving.batch import Batch
    from kernel.serving.instance import Instance
    from kernel.serving.model import Model


class RateLimiting:
    """Puts models under the limiter. Implements `kernel.serving.model.ModelExtension`."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    async def extend(self, model: Model, folder: Path) -> None:
        """Put the instances of a model under the limiter. Raises `InvalidArgument` if one could never execute."""
        gate = InstanceGate(model, self._limiter)
        gate.change(model.config)
        model.instances.limit(gate)
        model.on_change, model.on_closed = gate.change, gate.close


class InstanceGate:
    """Asks the limiter for each batch of a model. Implements `kernel.serving.instances.InstanceAdmission`."""

    def __init__(self, model: Model, limiter: Limiter) -> None:
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
            found = self._gated[instance] = GatedInstance(self, instance, needs, self._former.pop(instance.name, 0))
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
        """See `InstanceAdmission`. The instance keeps the resources of the batches that it finishes."""
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

    # ---- for the limiter -----------------------------------------------------------------------------

    def wants(self, instance: Instance) -> bool:
        """Whether a request is queued that `instance` could take now."""
        return self._model.live.queued > 0 and instance in self._model.instances.serving and is_idle(instance)

    def wake(self, instance: Instance) -> None:
        """Let the scheduler ask for `instance` again."""
        self._model.inbox.post(InstanceIdle(instance))


class GatedInstance:
    """Implements `kernel.limiting.limiter.LimitedInstance`."""

    def __init__(self, gate: InstanceGate, instance: Instance, needs: InstanceNeeds, executions: int) -> None:
        self.instance = instance
        self.needs = needs
        self.executions = executions
        #: The numbers of its batches that have resources. Batches of a warm-up have none.
        self.numbers: set[int] = set()
        self._gate = gate

    def wants_to_run(self) -> bool:
        return self._gate.wants(self.instance)

    def wake(self) -> None:
        self._gate.wake(self.instance)


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
