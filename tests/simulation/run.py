"""Runs seeds, and shortens the scenario of a seed that fails."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from schedulers.registry import choose_scheduler
from tests.simulation.actions import ACTIONS
from tests.simulation.kinds import load_kinds
from tests.simulation.scenarios import scenario
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.simulation.plan import Action, Scenario
    from tests.simulation.story import Story

#: How many runs a scenario may take to be shortened.
_SHORTENING_RUNS = 400


class Failure(msgspec.Struct):
    """A run in which something did not hold."""

    scenario: Scenario
    error: BaseException
    story: Story

    def text(self, last: int = 40) -> str:
        """Return the story and what did not hold at its end."""
        lines = self.story.lines(last)
        missing = len(self.story) - len(lines)
        head = [f"seed {self.scenario.seed}: {_models(self.scenario)}"]
        head += [f"    ({missing} lines before)"] if missing else []
        return "\n".join([*head, *(f"    {line}" for line in lines), f"  {type(self.error).__name__}: {self.error}"])


class Simulation:
    """Runs scenarios, all on one event loop."""

    def __init__(self, schedule: Callable[..., Any] = choose_scheduler, only: str = "") -> None:
        """`schedule` replaces the schedulers. With `only`, there are only models of that kind."""
        self._schedule = schedule
        self._only = only
        self._kinds = load_kinds()
        self._loop = asyncio.SelectorEventLoop()
        #: Steps of all runs, and their requests.
        self.steps = self.requests = 0

    def __enter__(self) -> Simulation:
        self._level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # lost workers and failed schedulers are part of the story
        return self

    def __exit__(self, *_: object) -> None:
        logging.disable(self._level)
        self._loop.close()

    def seed(self, seed: int) -> Failure | None:
        """Run the scenario of a seed."""
        return self.scenario(scenario(seed, self._kinds, self._only))

    def scenario(self, wanted: Scenario) -> Failure | None:
        """Run a scenario."""
        return self.world(wanted)[1]

    def world(self, wanted: Scenario) -> tuple[World, Failure | None]:
        """Run a scenario, and return its world as it was at the end."""
        world = World(wanted, self._kinds, self._schedule)
        failure = None
        try:
            self._loop.run_until_complete(world.run(ACTIONS))
        except Exception as error:
            failure = Failure(wanted, world.violation or error, world.story)
        self.steps += world.steps
        self.requests += len(world.clients)
        return world, failure

    def shortened(self, failure: Failure) -> Failure:
        """Return a failure of a scenario with as few actions as a limited search finds."""
        runs = _SHORTENING_RUNS
        size = max(1, len(failure.scenario.actions) // 2)
        while runs > 0:
            smaller = None
            for actions in _without_some(failure.scenario.actions, size):
                runs -= 1
                smaller = self.scenario(msgspec.structs.replace(failure.scenario, actions=actions))
                if smaller is not None or runs <= 0:
                    break
            if smaller is not None:
                failure = smaller
                size = min(size, max(1, len(failure.scenario.actions) // 2))
            elif size == 1:
                break
            else:
                size //= 2
        return failure


def portion(seeds: range, only: str) -> tuple[int, int, int, list[str]]:
    """Run some seeds; returns their number, their steps and requests, and the stories of those that fail."""
    with Simulation(only=only) as simulation:
        failures = [failure for seed in seeds if (failure := simulation.seed(seed))]
        stories = [simulation.shortened(failure).text() for failure in failures]
        return len(seeds), simulation.steps, simulation.requests, stories


def _without_some(actions: list[Action], size: int) -> Iterator[list[Action]]:
    """Yield the actions without `size` of them, at each place. Later ones go first: they matter less."""
    for start in range(max(0, len(actions) - size), -size, -size):
        yield actions[: max(0, start)] + actions[max(0, start + size) :]


def _models(wanted: Scenario) -> str:
    return ", ".join(
        f"{plan.spec.name} ({plan.kind}, {plan.instances} instances"
        + (f", concurrency {plan.concurrency}" if plan.concurrency > 1 else "")
        + ")"
        for plan in wanted.models
    )
