"""Where results lie and how they are written: whole or not at all, numbers beside pictures.

A full run writes what the repository shows (`bench/results/`); a quick one is for looking at (`build/bench/`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

PUBLISHED = Path(__file__).parent / "results"
QUICK = Path(__file__).parents[1] / "build" / "bench"

Result = TypeVar("Result", bound=msgspec.Struct)


def stem(name: str, *, quick: bool) -> Path:
    """Return where the result `name` goes, without an ending."""
    return (QUICK if quick else PUBLISHED) / name


def write(path: Path, text: bytes) -> None:
    """Write a file so that a reader, or an interrupted run, never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, result: Any) -> None:
    """Write a result as JSON that people can read and compare."""
    write(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def read_json(path: Path, kind: type[Result]) -> Result:
    """Read a result again. Raises `OSError`, or `msgspec.DecodeError` for a file of another kind."""
    return msgspec.json.decode(path.read_bytes(), type=kind)
