"""The files of results. A file is written completely or not at all; numbers are next to their pictures.

A full run writes the files that the repository shows (`bench/results/`), a quick run writes to `build/bench/`.
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
