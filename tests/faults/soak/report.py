"""The table of a soak: a line for each sample while it runs, and what changed at its end."""

from __future__ import annotations

import msgspec

from bench.machine import Machine
from tests.faults.row import Result
from tests.faults.rows.table import ROWS
from tests.faults.soak.holdings import Holdings
from tests.faults.soak.verdict import EXACTLY, NEARLY, after_warm_up, change, warm_up_s
from tests.faults.stored import machine_line

_COLUMNS = {
    "at_s": "seconds",
    "requests": "requests",
    "memory": "private MiB",
    "children_memory": "of children",
    "descriptors": "descriptors",
    "children_descriptors": "of children",
    "threads": "threads",
    "children": "children",
    "leased": "leased B",
    "regions": "regions",
    "sequences": "sequences",
    "connections": "connections",
}
_WIDTH = 11


class SoakReport(msgspec.Struct, frozen=True):
    """A whole run, as it is stored."""

    machine: Machine
    seconds: float
    rate: float
    seed: int
    kills: int
    #: Processor time of the server and of its children that live at the end.
    cpu_s: float
    outcomes: dict[str, int]
    texts: dict[str, int]
    samples: list[Holdings]
    wrong: list[str]


def print_header(seconds: float, rate: float, seed: int) -> None:
    """Say what runs, and name the columns."""
    print(f"{seconds / 60:g} minutes, {rate:g} requests a second, seed {seed}")
    print(" ".join(f"{each:>{_WIDTH}}" for each in _COLUMNS.values()), flush=True)


def print_sample(sample: Holdings, first: Holdings) -> None:
    """Print one line, and of which descriptors and processes there are more or fewer than in the
    first sample."""
    cells = []
    for name in _COLUMNS:
        value = getattr(sample, name)
        cells.append(f"{value / (1 << 20):.1f}" if name.endswith("memory") else f"{value:.0f}")
    more = [*_differences(sample.kinds, first.kinds), *_differences(sample.processes, first.processes)]
    print(" ".join(f"{each:>{_WIDTH}}" for each in cells), ", ".join(more), flush=True)


def _differences(now: dict[str, int], before: dict[str, int]) -> list[str]:
    both = {**before, **now}
    return [f"{name} {difference:+}" for name in both if (difference := now.get(name, 0) - before.get(name, 0))]


def row_of(report: SoakReport) -> Result:
    """Return row S12 of the scoreboard."""
    counted = after_warm_up(report.samples, report.seconds)
    memory = [each.memory / (1 << 20) for each in counted]
    same = [f"{name} {change(counted, name):+.1%}" for name in (*NEARLY, "descriptors", "threads", "children")]
    row = next(row for row in ROWS if row.id == "S12")
    figure = (
        f"{report.seconds / 60:g} minutes, {report.samples[-1].requests:,} requests of 14 kinds, {report.kills} kills: "
        f"private memory {min(memory):.1f} to {max(memory):.1f} MiB; last third against the first: {', '.join(same)}; "
        "0 leased bytes, regions and sequences; every request ended once"
    )
    return Result(
        row=row.id,
        promise=row.promise,
        fault=row.fault,
        limit=row.limit,
        figure=figure,
        passed=not report.wrong,
        reason="; ".join(report.wrong),
        date=report.machine.date,
        commit=report.machine.commit,
        machine=machine_line(report.machine),
        full=report.seconds >= 3600,
    )


def print_report(report: SoakReport) -> None:
    """Print what became of the requests, and how much each figure changed after the warm-up."""
    for name, count in report.outcomes.items():
        print(f"{count:>8} {name}")
    for text, count in report.texts.items():
        print(f"{count:>8} {text}")
    counted = after_warm_up(report.samples, report.seconds)
    print(f"\n{report.kills} workers and helpers were killed; the server used {report.cpu_s:.0f} s of a processor.")
    print(f"After the first {warm_up_s(report.seconds):.0f} s:")
    for name in (*NEARLY, *EXACTLY):
        values = [getattr(each, name) for each in counted]
        if values:
            unit = 1 << 20 if name.endswith("memory") else 1
            least, most = min(values) / unit, max(values) / unit
            print(f"{name:>22}: {least:.4g} to {most:.4g}, last third against the first {change(counted, name):+.1%}")
    for text in report.wrong:
        print(f"WRONG: {text}")
    print("nothing has grown, every request ended once" if not report.wrong else "FAILED")
