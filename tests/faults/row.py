"""A row of the scoreboard: a fault, the promise that it tests, the limit, and how it is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Settings(msgspec.Struct, frozen=True):
    """How rows are measured."""

    #: A folder of the row's own, for repositories and files.
    folder: Path
    #: Whether rows repeat their fault as often as the promise says, which takes minutes.
    full: bool = False

    def count(self, few: int, many: int) -> int:
        """Return how often a fault is repeated."""
        return many if self.full else few

    def repository(self) -> Path:
        """Return a new folder for models."""
        path = self.folder / "models"
        path.mkdir()
        return path


class Finding(msgspec.Struct, frozen=True):
    """What was measured: the figure in words, what breaks the promise, and texts of errors that clients got."""

    figure: str
    wrong: list[str] = []
    texts: list[str] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row. Without `measure`, `reason` says why it cannot be measured here."""

    #: As in the list of rows: S1 to S40.
    id: str
    #: P1 to P12.
    promise: str
    fault: str
    limit: str
    measure: Callable[[Settings], Finding] | None = None
    reason: str = ""


class Skipped(Exception):
    """A row cannot be measured on this machine; the message says why."""


class Result(msgspec.Struct, frozen=True):
    """A row that was measured, as it is stored: one line of JSON."""

    row: str
    promise: str
    fault: str
    limit: str
    figure: str
    #: None where the row was not measured.
    passed: bool | None
    #: What breaks the promise, or why the row was not measured.
    reason: str
    date: str
    commit: str
    machine: str
    full: bool
    texts: list[str] = []
    #: How much the machine was disturbed meanwhile: `Disturbance`.
    stall_ms: float = 0.0
    others: float = 0.0
    #: How often it was measured until it passed, or was not disturbed.
    measurements: int = 1


def at_most(name: str, value: float, limit: float, unit: str = "") -> list[str]:
    """Return what is wrong if a value is above its limit."""
    return [f"{name} is {value:.4g}{unit}, the limit is {limit:g}{unit}"] if value > limit else []


def percentile(values: list[float], part: float) -> float:
    """Return the value below which `part` of the values are, 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0
