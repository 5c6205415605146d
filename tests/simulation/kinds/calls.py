"""Models that call others while they execute: deep, wide, one after the other, themselves, and in circles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.spec import DynamicBatching
from kernel.testing import model_spec
from tests.simulation import draw
from tests.simulation.checks import Checks
from tests.simulation.kinds import KINDS, register
from tests.simulation.plan import ModelPlan

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.plan import Action
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.world import World

#: Who calls whom: for each model that calls, its stages with the numbers of the models that it calls at the same time.
#: Further numbers are models that call none.
_GRAPHS: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...] = (
    (((1,),),),
    (((1,), (1,), (2,)),),
    (((1,) * 8,),),
    (((1,),), ((2,),), ((3,),)),
    (((1, 2), (3,)), ((3, 3),), ((3,),)),
    (((0,),),),
    (((1,),), ((0,),)),
    (((1, 2),), ((0,), (2,))),
)


class Calling:
    """`kernel.serving.calls` and `backends.supervision.calls`."""

    name = "calls"
    weight = 3

    def models(self, random: Random, name: str) -> list[ModelPlan]:
        graph = random.choice(_GRAPHS)
        count = 1 + max(each for stages in graph for stage in stages for each in stage)
        batching = random.random() < 0.4
        called = [self._called(random, f"{name}_{number}", batching) for number in range(len(graph), count)]
        # Rows of a caller are those of its calls.
        size = min((plan.spec.max_batch_size for plan in called), default=4) if batching else 0
        return [
            self._calling(random, f"{name}_{number}", name, size, stages) for number, stages in enumerate(graph)
        ] + called

    def _calling(
        self, random: Random, name: str, prefix: str, size: int, stages: tuple[tuple[int, ...], ...]
    ) -> ModelPlan:
        ordered = DynamicBatching(preserve_ordering=True) if random.random() < 0.2 else None
        return ModelPlan(
            kind=self.name,
            spec=model_spec(name, max_batch_size=size, dims=(-1,), dynamic_batching=ordered),
            instances=random.choice((1, 1, 2, 3)),
            concurrency=random.choice((1, 1, 1, 2)),
            execution_ns=random.choice(draw.EXECUTION_TIMES),
            failure_percent=random.choice((0, 0, 10)),
            restart_ns=random.choice((draw.MS, 10 * draw.MS)),
            calls=tuple(tuple(f"{prefix}_{number}" for number in stage) for stage in stages),
            batches_without_calls=random.choice((0, 0, 0, 2, 5)),
            called=name.endswith("_0") or random.random() < 0.3,
        )

    def _called(self, random: Random, name: str, batching: bool) -> ModelPlan:
        """Return a model that calls none: with batching exactly if its callers have it."""
        while True:
            [plan] = KINDS[random.choice(("direct", "dynamic")) if batching else "direct"].models(random, name)
            if bool(plan.spec.max_batch_size) == batching:
                plan.called = random.random() < 0.3
                return plan

    def actions(self, random: Random, plan: ModelPlan, model: int, horizon_ns: int) -> list[Action]:
        return draw.calls(random, plan, model, horizon_ns)

    def checks(self, world: World, version: SimulatedVersion) -> Checks:
        return CallingChecks(world, version)


class CallingChecks(Checks):
    """At most one batch waits in a worker whose model waits for a call, unless there was another instance for it."""

    def most_kept(self) -> int:
        """Return how many batches may wait behind one that waits for a call."""
        return 1 if len(self.version.instances) == 1 or self.version.instances_changed else 0

    def at_rest(self) -> None:
        super().at_rest()
        for instance in self.version.instances:
            worker = instance.worker
            if worker is not None and not worker.paused and worker.concurrency == 1 and worker.calls.waits:
                kept = [message.batch for message in worker.waiting]
                self.world.check(
                    len(kept) <= self.most_kept(), "%s has batches %s and waits for a call", worker.title, kept
                )


register(Calling())
