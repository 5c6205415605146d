"""The files of results. A file is written completely or not at all; numbers are next to their pictures.

A full run writes the files that the repository shows (`bench/results/`), a quick run writes to `build/bench/`.

`results/kept.json` has the figures of every row at the last landed commit. Each landing is compared with the commit
before it, in pairs. A loss of two percent is within the noise of each comparison, and ten of them are a fifth. The kept
figures show it, on a machine of the same kind; on another machine their ratio is no more than a hint, because the
machine differs as well.
"""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.machine import Machine

PUBLISHED = Path(__file__).parent / "results"

QUICK = Path(__file__).parents[1] / "build" / "bench"

Result = TypeVar("Result", bound=msgspec.Struct)


def stem(name: str, *, quick: bool) -> Path:
    """Return the path of the result `name` without its suffix."""
    return (QUICK if quick else PUBLISHED) / name


def write(path: Path, text: bytes) -> None:
    """Write a file. A reader never sees half of it, also when the run is interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, result: Any) -> None:
    """Write a result as indented JSON."""
    write(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def read_json(path: Path, kind: type[Result]) -> Result:
    """Read a result. Raises `OSError`, or `msgspec.DecodeError` for a file of another kind."""
    return msgspec.json.decode(path.read_bytes(), type=kind)


KEPT = PUBLISHED / "kept.json"


class KeptFigures(msgspec.Struct, frozen=True):
    """The medians of a row: requests per second, microseconds of its p99, and of the main process's CPU time."""

    rate: float
    p99_us: float
    main_us: float
    rounds: int


class KeptRow(msgspec.Struct, frozen=True):
    """The figures of a row, and where and when they were measured."""

    figures: KeptFigures
    commit: str
    date: str
    processor: str
    cores: int


class Kept(msgspec.Struct, frozen=True):
    """All kept figures, by the name of the row. A run of some rows replaces only theirs."""

    rows: dict[str, KeptRow] = {}

    def ratio(self, name: str, rate: float, machine: Machine) -> KeptRatio | None:
        """Return the ratio of a rate to the kept one; None for a row without."""
        row = self.rows.get(name)
        if row is None:
            return None
        same = (row.processor, row.cores) == (machine.processor, machine.cores)
        return KeptRatio(rate / row.figures.rate, same)

    def with_rows(self, figures: Mapping[str, KeptFigures], machine: Machine) -> Kept:
        """Return these figures with the figures of a run in their place."""
        new = {
            name: KeptRow(each, machine.commit, machine.date, machine.processor, machine.cores)
            for name, each in figures.items()
        }
        return Kept(dict(sorted((self.rows | new).items())))


class KeptRatio(msgspec.Struct, frozen=True):
    """The ratio of a rate to the kept one, and whether the machine is of the same kind."""

    ratio: float
    same_machine: bool

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{'' if self.same_machine else '?'}"


def read_kept(path: Path = KEPT) -> Kept:
    """Return the kept figures; none if there is no file yet."""
    return read_json(path, Kept) if path.exists() else Kept()


def kept_line(ratios: Mapping[str, KeptRatio]) -> str:
    """Return one line on all ratios to the kept figures: their mean, and what a `?` says. Empty without any."""
    if not ratios:
        return ""
    mean = statistics.geometric_mean(each.ratio for each in ratios.values())
    low = min(ratios, key=lambda name: ratios[name].ratio)
    spread = math.exp(statistics.pstdev(math.log(each.ratio) for each in ratios.values()))
    hint = "" if all(each.same_machine for each in ratios.values()) else "; ?: kept on another machine, a hint only"
    return (
        f"kept: the rate now / the one of {KEPT.name}, geometric mean {mean:.2f} (a factor of {spread:.2f} around it),"
        f" lowest {ratios[low]} in {low}{hint}"
    )
