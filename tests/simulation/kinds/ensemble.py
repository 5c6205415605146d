"""Ensembles: chains, steps side by side, a limit of requests in flight, decoupled steps, which clients call as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.spec import EnsembleSpec, EnsembleStep, TensorSpec
from kernel.testing import model_spec
from tests.simulation import draw
from tests.simulation.checks import Checks
from tests.simulation.kinds import KINDS, register
from tests.simulation.plan import ModelPlan

if TYPE_CHECKING:
    from random import Random

    from kernel import errors
    from tests.simulation.clients import Client
    from tests.simulation.plan import Action
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.world import World

#: Shapes of ensembles: for each step its number, input tensor and output tensor; then the outputs of the ensemble.
_GRAPHS: tuple[tuple[tuple[tuple[int, str, str], ...], tuple[str, ...]], ...] = (
    (((0, "IN", "OUT"),), ("OUT",)),
    (((0, "IN", "MID"), (1, "MID", "OUT")), ("OUT",)),
    (((0, "IN", "A"), (1, "A", "B"), (2, "B", "OUT")), ("OUT",)),
    (((0, "IN", "A"), (0, "A", "OUT")), ("OUT",)),
    (((0, "IN", "OUT"), (1, "IN", "MORE")), ("OUT", "MORE")),
    (((0, "IN", "A"), (1, "A", "OUT"), (2, "A", "MORE")), ("OUT", "MORE", "A")),
)


class Ensemble:
    """`schedulers.ensemble`."""

    name = "ensemble"
    weight = 3

    def models(self, random: Random, name: str) -> list[ModelPlan]:
        graph, outputs = random.choice(_GRAPHS)
        steps = [self._step(random, f"{name}_{number}") for number in range(1 + max(step for step, _, _ in graph))]
        batching = all(plan.spec.max_batch_size for plan in steps)
        size = min(plan.spec.max_batch_size for plan in steps) if batching else 0
        spec = model_spec(name, max_batch_size=size, dims=(-1,), decoupled=any(p.spec.decoupled for p in steps))
        shape = (-1, -1) if size else (-1,)
        spec = msgspec.structs.replace(
            spec,
            platform="ensemble",
            backend="",
            outputs={each: TensorSpec(each, "FP32", (-1,), shape) for each in outputs},
            ensemble=EnsembleSpec(
                tuple(EnsembleStep(f"{name}_{n}", "", {"IN": given}, {"OUT": made}) for n, given, made in graph),
                random.choice((0, 0, 1, 2)) if any(plan.spec.decoupled for plan in steps) else 0,
            ),
        )
        return [ModelPlan(kind=self.name, spec=spec, instances=0), *steps]

    def _step(self, random: Random, name: str) -> ModelPlan:
        """Return a step: all with batching or, for one of four ensembles, some without."""
        kind = KINDS[random.choice(("direct", "dynamic"))]
        [plan] = kind.models(random, name)
        plan.called = random.random() < 0.3
        return plan

    def actions(self, random: Random, plan: ModelPlan, model: int, horizon_ns: int) -> list[Action]:
        return draw.calls(random, plan, model, horizon_ns, priority=random.choice((0, 1, 2)))

    def checks(self, world: World, version: SimulatedVersion) -> Checks:
        return EnsembleChecks(world, version)


class EnsembleChecks(Checks):
    """A living request has a step in flight, and fails only if a step failed or could not be submitted."""

    def inner(self, client: Client) -> list[Client]:
        """Return the requests of the steps of a request."""
        return [each for each in self.world.inner if each.request.parent is client.request]

    def expected(self, client: Client, error: errors.ServingError) -> bool:
        steps = self.inner(client)
        if error.message.startswith(f"in ensemble '{self.spec.name}', "):
            failed = any(step.error is not None for step in steps)
            # A decoupled step may end without any response.
            stuck = "unexpected deadlock" in error.message and self.spec.decoupled
            full = "no memory left for a tensor" in error.message
            return failed or stuck or full or self._may_not_submit(error)
        return super().expected(client, error)

    def _may_not_submit(self, error: errors.ServingError) -> bool:
        """Whether a step's model may be away, or has refused requests because none of its workers could be started."""
        names = {step.model_name for step in self.spec.ensemble.steps} if self.spec.ensemble else set()
        world = self.world
        steps = [world.serving[n] for n, plan in enumerate(world.scenario.models) if plan.spec.name in names]
        # The error comes when the other steps have ended. Then an instance may live again.
        refused = "no instance of model" in error.message
        away = any(version is None or (refused and version.restarts_failed) for version in steps)
        return away or world.abandoned or world.scenario.impatient_unload

    def at_rest(self) -> None:
        if self.version.closed:
            return
        for client in self.queued():
            if not any(step.waits for step in self.inner(client)):
                self.world.check(self._keeps_back(), "%s waits, and none of its steps is in flight", client)

    def _keeps_back(self) -> bool:
        """Whether requests or responses of steps may wait for those of other requests."""
        ensemble = self.spec.ensemble
        assert ensemble is not None
        ordered = {
            plan.spec.name
            for plan in self.world.scenario.models
            if plan.spec.dynamic_batching is not None and plan.spec.dynamic_batching.preserve_ordering
        }
        return ensemble.max_inflight_requests > 0 or not ordered.isdisjoint(ensemble.models)


register(Ensemble())
