"""Models without batching: each request alone, first come, first served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.testing import model_spec
from tests.simulation import draw
from tests.simulation.checks import Checks
from tests.simulation.kinds import register
from tests.simulation.plan import ModelPlan

if TYPE_CHECKING:
    from random import Random

    from kernel.serving.batch import Batch
    from tests.simulation.plan import Action
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.workers import SimulatedHandle
    from tests.simulation.world import World


class Direct:
    """`schedulers.direct`."""

    name = "direct"
    weight = 2

    def models(self, random: Random, name: str) -> list[ModelPlan]:
        batch = random.choice((0, 0, 4))
        return [
            ModelPlan(
                kind=self.name,
                spec=model_spec(name, max_batch_size=batch, dims=(-1,), decoupled=random.random() < 0.2),
                instances=random.choice((1, 1, 2, 3)),
                concurrency=random.choice((1, 1, 1, 2)),
                execution_ns=random.choice(draw.EXECUTION_TIMES),
                failure_percent=random.choice((0, 0, 10)),
                restart_ns=random.choice((draw.MS, 10 * draw.MS)),
                autoscale=draw.autoscale(random),
            )
        ]

    def actions(self, random: Random, plan: ModelPlan, model: int, horizon_ns: int) -> list[Action]:
        return draw.calls(random, plan, model, horizon_ns)

    def checks(self, world: World, version: SimulatedVersion) -> Checks:
        return DirectChecks(world, version)


class DirectChecks(Checks):
    """One request in each batch."""

    def dispatched(self, handle: SimulatedHandle, batch: Batch) -> None:
        super().dispatched(handle, batch)
        self.world.check(len(batch.entries) == 1, "%s gets several requests without batching", handle.name)


register(Direct())
