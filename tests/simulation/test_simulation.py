"""Some hundred seeds of the simulation. Many more: `python -m tests.simulation --seeds 10000`."""

from __future__ import annotations

import pytest

from tests.simulation.kinds import load_kinds
from tests.simulation.run import Simulation
from tests.simulation.scenarios import scenario

pytestmark = pytest.mark.slow

#: Each portion of seeds is a test, so that they share processors.
PORTIONS = [range(first, first + 50) for first in range(0, 400, 50)]


@pytest.mark.slow_loop("a scenario of a thousand steps is one piece of work")
@pytest.mark.parametrize("seeds", PORTIONS, ids=str)
def test_whatever_happens_all_invariants_hold(seeds: range) -> None:
    with Simulation() as simulation:
        for seed in seeds:
            failure = simulation.seed(seed)
            assert failure is None, "\n" + simulation.shortened(failure).text()


@pytest.mark.slow_loop("a scenario of a thousand steps is one piece of work")
@pytest.mark.parametrize("kind", sorted(load_kinds()))
def test_each_kind_of_model_holds_alone(kind: str) -> None:
    with Simulation(only=kind) as simulation:
        for seed in range(30):
            failure = simulation.seed(seed)
            assert failure is None, "\n" + simulation.shortened(failure).text()
        assert simulation.requests > 100


def test_a_seed_always_has_the_same_story() -> None:
    with Simulation() as simulation:
        for seed in range(10):
            wanted = scenario(seed, load_kinds())
            stories = [simulation.world(wanted)[0].story.lines() for _ in range(2)]
            assert stories[0] == stories[1]
            assert stories[0]
