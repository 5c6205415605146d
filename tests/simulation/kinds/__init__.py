"""Kinds of models in the simulation, a module for each. Importing a module registers its kind.

A kind draws models and the requests of their clients, and knows what else must hold for them.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.checks import Checks
    from tests.simulation.plan import Action, ModelPlan
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.world import World


class Kind(Protocol):
    """How models of one kind are made, called, and checked."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> int:
        """How often scenarios have such a model, compared with the other kinds."""

    def models(self, random: Random, name: str) -> list[ModelPlan]:
        """Return a model called `name`, and after it the models that it needs. Their names begin with `name`."""

    def actions(self, random: Random, plan: ModelPlan, model: int, horizon_ns: int) -> list[Action]:
        """Return what clients do with a model that is called, number `model` of the scenario, until `horizon_ns`."""

    def checks(self, world: World, version: SimulatedVersion) -> Checks:
        """Return the checks of a loaded version."""


KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Let scenarios have models of `kind`."""
    KINDS[kind.name] = kind


def load_kinds() -> dict[str, Kind]:
    """Import all modules of this folder, and return the kinds by name."""
    if not KINDS:
        for module in sorted(each.name for each in pkgutil.iter_modules(__path__)):
            importlib.import_module(f"{__name__}.{module}")
    return KINDS
