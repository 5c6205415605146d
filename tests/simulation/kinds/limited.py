"""Models under the rate limiter, which share resources: with and without dynamic batching."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import DynamicBatching
from kernel.testing import model_spec
from schedulers.ratelimit import GLOBAL, InstanceGate, InstanceNeeds, Resource
from tests.simulation import draw
from tests.simulation.checks import Checks
from tests.simulation.kinds import register
from tests.simulation.plan import ModelPlan

if TYPE_CHECKING:
    from random import Random

    from kernel.serving.batch import Batch
    from tests.simulation.clients import Client
    from tests.simulation.plan import Action
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.workers import SimulatedHandle
    from tests.simulation.world import World


class Limited:
    """One to three models whose instances need the same resources."""

    name = "limited"
    weight = 2

    def models(self, random: Random, name: str) -> list[ModelPlan]:
        return [self._model(random, f"{name}{letter}") for letter in "abc"[: random.randint(1, 3)]]

    def _model(self, random: Random, name: str) -> ModelPlan:
        size = random.choice((0, 0, 1, 4))
        batching = DynamicBatching() if size and random.random() < 0.5 else None
        counts = {Resource(each, GLOBAL): random.choice((1, 1, 2)) for each in ("R", "S") if random.random() < 0.7}
        return ModelPlan(
            kind=self.name,
            spec=model_spec(name, max_batch_size=size, dims=(-1,), dynamic_batching=batching),
            instances=random.choice((1, 2, 3)),
            concurrency=random.choice((1, 1, 2)),
            execution_ns=random.choice(draw.EXECUTION_TIMES),
            failure_percent=random.choice((0, 0, 10)),
            restart_ns=random.choice((draw.MS, 10 * draw.MS)),
            needs=InstanceNeeds(counts, random.choice((1, 1, 2, 5))),
        )

    def actions(self, random: Random, plan: ModelPlan, model: int, horizon_ns: int) -> list[Action]:
        return draw.calls(random, plan, model, horizon_ns)

    def checks(self, world: World, version: SimulatedVersion) -> Checks:
        return LimitedChecks(world, version)


class LimitedChecks(Checks):
    """No more is used of a resource than there is, and an instance waits only for resources that are used."""

    def __init__(self, world: World, version: SimulatedVersion) -> None:
        super().__init__(world, version)
        needs = version.plan.needs
        assert needs is not None
        self.needs = needs
        config = ModelConfig()
        group = config.instance_group.add(name=version.title)
        group.rate_limiter.priority = needs.priority
        for resource, count in needs.counts.items():
            group.rate_limiter.resources.add(name=resource.name, count=count, **{"global": True})
        world.limited.append(self)  # before others may be dispatched because of its needs
        gate = InstanceGate(version.model, world.limiter)
        version.model.instances.limit(gate)
        gate.change(config)
        version.model.on_change, version.model.on_closed = gate.change, gate.close

    def most_ahead(self) -> int:
        """Nothing is dispatched ahead of time: it would keep resources and not use them."""
        return 1

    def dispatched(self, handle: SimulatedHandle, batch: Batch) -> None:
        super().dispatched(handle, batch)
        used, limits = self._used(), self._limits()
        for resource, limit in limits.items():
            self.world.check(used[resource] <= limit, "%s of %s %s are used", used[resource], limit, resource.name)

    def reason_to_wait(self, queued: list[Client]) -> str:
        """A resource that it needs is used, or kept for an instance that waits for another one, which is used."""
        used, wanted = self._used(), set(self.needs.counts)
        waiting = [set(each.needs.counts) for each in self._others() if each.queued()]
        for _ in waiting:
            for needs in waiting:
                wanted |= needs if needs & wanted else set()
        return "a resource is used" if any(used[resource] for resource in wanted) else ""

    def _others(self) -> list[LimitedChecks]:
        """Return the checks of all versions that share resources, this one's among them."""
        return [each for each in self.world.limited if isinstance(each, LimitedChecks) and not each.version.closed]

    def _limits(self) -> Counter[Resource]:
        """Return how much there is: of each resource as much as the version needs that needs most."""
        most: Counter[Resource] = Counter()
        for each in self._others():
            most |= Counter(each.needs.counts)
        return most

    def _used(self) -> Counter[Resource]:
        """Return what the batches use that workers have."""
        used: Counter[Resource] = Counter()
        for each in self._others():
            for instance in each.version.instances:
                batches = len(instance.handle.record.batches) if instance.handle is not None else 0
                for resource, count in each.needs.counts.items():
                    used[resource] += batches * count
        return used


register(Limited())
