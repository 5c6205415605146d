"""From a seed to a scenario."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.simulation import draw
from tests.simulation.plan import Action, ModelPlan, Scenario

if TYPE_CHECKING:
    from tests.simulation.kinds import Kind

#: Faults, and how often there is one in a scenario, in percent for each model.
_FAULTS = {
    "cancel": 30, "kill": 35, "kill_all": 8, "pause": 12, "reload": 12, "unload": 8, "grow": 10, "shrink": 10,
    "fail_scheduler": 5,
}  # fmt: skip


#: An ensemble has no instances. If its scheduler fails, the event that it handles is lost, and so is the memory of a
#: step's response.
_OF_ENSEMBLES = ("cancel", "reload", "unload")


def scenario(seed: int, kinds: dict[str, Kind], only: str = "") -> Scenario:
    """Return the scenario of a seed, with models of all kinds or of the kind `only`."""
    random = Random(seed)
    chosen = [kinds[only]] if only else list(kinds.values())
    plans: list[ModelPlan] = []
    actions: list[Action] = []
    horizon_ns = random.choice((5, 20, 60)) * draw.MS
    for number in range(random.choice((1, 1, 2, 3))):
        [kind] = random.choices(chosen, [each.weight for each in chosen])
        made = kind.models(random, f"m{number}")
        for plan in made:
            index = len(plans)
            plans.append(plan)
            if plan.called:
                actions += kind.actions(random, plan, index, horizon_ns)
            faults = _faults(random, index, horizon_ns)
            actions += [each for each in faults if plan.spec.ensemble is None or each.verb in _OF_ENSEMBLES]
    if random.random() < 0.15:
        at_ns = draw.time(random, horizon_ns // 2, horizon_ns)
        actions.append(Action(at_ns, "drain"))
        if random.random() < 0.3:
            actions.append(Action(draw.time(random, at_ns, 2 * horizon_ns), "abandon"))
    actions.sort(key=lambda action: action.at_ns)
    return Scenario(
        seed=seed,
        models=plans,
        actions=actions,
        lateness_ns=random.choice((0, 0, 0, 200 * draw.US)),
        actions_first=random.random() < 0.3,
        impatient_unload=random.random() < 0.2,
        arena_byte_size=random.choice((1 << 20, 1 << 14)),
    )


def _faults(random: Random, model: int, horizon_ns: int) -> list[Action]:
    found: list[Action] = []
    for verb, percent in _FAULTS.items():
        while random.randrange(100) < percent:
            found.append(
                Action(
                    draw.time(random, draw.GRID_NS, horizon_ns),
                    verb,
                    model,
                    random.randrange(1 << 16),
                    draw.time(random, draw.GRID_NS, 5 * draw.MS),
                )
            )
    return found
