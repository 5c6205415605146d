"""Where the results of rows are kept: a line of JSON for each, and the table of `docs/reliability.md`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.checkout import ROOT
from bench.store import write
from tests.faults.page import merged, with_table
from tests.faults.row import Result
from tests.faults.rows.table import ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.machine import Machine

PAGE = ROOT / "docs" / "reliability.md"
STORED = Path(__file__).parent / "scoreboard.jsonl"


def stored() -> list[Result]:
    """Return the results of earlier runs."""
    if not STORED.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in STORED.read_bytes().splitlines()]


def publish(results: Sequence[Result]) -> None:
    """Put new results in place of the stored ones of the same rows, and write the table."""
    everything = merged(stored(), results, ROWS)
    lines = [msgspec.json.encode(msgspec.structs.replace(each, texts=[])) for each in everything]
    write(STORED, b"\n".join(lines) + b"\n")
    write(PAGE, with_table(PAGE.read_text(), everything).encode())


def machine_line(machine: Machine) -> str:
    """Return the machine in a few words."""
    return f"{machine.cores} cores ({machine.processor}), {machine.memory_gib} GiB, Python {machine.python}"
