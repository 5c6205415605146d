"""The traffic rules and rollouts of models, as front doors see them."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class RoutedCount(msgspec.Struct, frozen=True):
    """How many requests a traffic rule has sent to a version for one reason."""

    model: str
    version: int
    reason: str
    count: int


class TargetShare(msgspec.Struct, frozen=True):
    """The share of the requests without a version that a version gets, from 0 to 1."""

    model: str
    version: str
    share: float


class RolloutFigures(msgspec.Struct, frozen=True):
    """Where the rollout of a model is."""

    model: str
    candidate: int
    stable: int
    phase: str
    #: Percent of the requests that the candidate gets.
    share: int
    #: Guard → `candidate`, `candidate_bad`, `stable`, `stable_bad` → how many.
    guards: dict[str, dict[str, int]]


class TrafficControl(Protocol):
    """The traffic rules of models. Implemented by `kernel.traffic.control.Traffic`."""

    def report(self, name: str) -> dict[str, Any]:
        """Return the rule of a model and what it means now, for JSON. Raises `ServingError` for an unknown model."""

    def change(self, name: str, members: dict[str, Any], by: str) -> None:
        """Replace members of the rule of a model; `by` is who does it, for the history. Raises `ServingError`."""

    def reset(self, name: str, by: str) -> None:
        """Give a model the rule of its file again, or none. Raises `ServingError` for an unknown model."""

    def start_rollout(self, name: str, document: dict[str, Any], by: str) -> None:
        """Begin a guarded rollout. Raises `ServingError`."""

    def command_rollout(self, name: str, action: str, by: str) -> None:
        """Pause, resume, promote or abort a rollout. Raises `ServingError`."""

    def rollout_figures(self) -> list[RolloutFigures]:
        """Return where the last rollout of each model is."""

    def routed(self) -> list[RoutedCount]:
        """Return the counts of all rules."""

    def shares(self) -> dict[str, list[TargetShare]]:
        """Return the shares of the versions by the name of the model that has the rule."""
