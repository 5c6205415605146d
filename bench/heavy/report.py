"""The table of `python -m bench heavy`, and what is stored of it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from bench.contenders import OURS, TRITON
from bench.heavy.attack import MIB
from bench.heavy.measurement import RowSample  # noqa: TC001 - msgspec reads it
from bench.heavy.verdict import RowVerdict  # noqa: TC001 - msgspec reads it
from bench.machine import Machine  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class HeavyResult(msgspec.Struct, frozen=True):
    """The rounds of a row on each server that was measured, and the verdict on ours."""

    row: str
    samples: dict[str, list[RowSample]]
    #: Why there are no figures, by server.
    failures: dict[str, str] = {}
    verdict: RowVerdict | None = None

    @property
    def wrong(self) -> list[str]:
        """What is wrong with our server in this row, in words."""
        failure = self.failures.get(OURS)
        return [failure] if failure else [] if self.verdict is None else self.verdict.wrong


class HeavyReport(msgspec.Struct, frozen=True):
    """A whole measurement, as it is stored. `triton` is empty if only our server was measured."""

    machine: Machine
    rounds: int
    body_byte_size: int
    #: Requests of each protocol per second that the healthy client sends.
    healthy_rate: float
    our_flags: list[str]
    triton: str
    #: The healthy client without an attack, in milliseconds, by server: p99 and longest wait.
    undisturbed_ms: dict[str, tuple[float, float]]
    results: list[HeavyResult]
    limits: dict[str, float]


#: Columns of figures: the name, and the text of a round's or rounds' figure.
_COLUMNS: dict[str, Callable[[Sequence[RowSample]], str]] = {
    "status": lambda samples: "/".join(dict.fromkeys(each.status for each in samples)),
    "after s": lambda samples: f"{statistics.median(each.seconds for each in samples):.2f}",
    "CPU s": lambda samples: f"{statistics.median(each.cpu_s for each in samples):.2f}",
    "p99 ms": lambda samples: f"{statistics.median(each.p99_ms for each in samples):.0f}",
    "longest": lambda samples: f"{statistics.median(each.longest_ms for each in samples):.0f}",
    "anon MiB": lambda samples: _mib(max(each.growth.anonymous for each in samples)),
    "shmem": lambda samples: _mib(max(each.growth.shared for each in samples)),
    "helpers": lambda samples: _mib(max(each.growth.helpers_anonymous for each in samples)),
    "sent": lambda samples: _mib(samples[0].body_byte_size),
    "response": lambda samples: _size(samples[0].response_byte_size),
}
_THEIRS = ("status", "after s", "p99 ms", "longest")
#: Columns of our figures relative to their limits.
_RATIOS = ("p99/limit", "longest/limit", "growth/limit")


def _ratios(verdict: RowVerdict | None) -> list[str]:
    if verdict is None:
        return [""] * len(_RATIOS)
    return [f"{ratio:.2f}" for ratio in (verdict.p99, verdict.longest, verdict.growth)]


def _mib(byte_size: int) -> str:
    return f"{byte_size / MIB:.0f}"


def _size(byte_size: int) -> str:
    return f"{byte_size} B" if byte_size < 10_000 else f"{byte_size / MIB:.1f} MiB"


def print_report(report: HeavyReport) -> None:
    """Print every row, ours and Triton's waits, and what is wrong."""
    with_triton = bool(report.triton)
    table = Table(title="Heavy requests: kernel CPU and memory, and the waits of a healthy client")
    table.add_column("row")
    for name in (*_COLUMNS, *_RATIOS, *(f"Triton {name}" for name in _THEIRS if with_triton)):
        table.add_column(name, justify="right")
    for result in report.results:
        ours, theirs = result.samples.get(OURS), result.samples.get(TRITON)
        cells = [text(ours) if ours else "" for text in _COLUMNS.values()]
        cells += _ratios(result.verdict)
        if with_triton:
            cells += [_COLUMNS[name](theirs) if theirs else "" for name in _THEIRS]
        table.add_row(result.row, *cells, style="red" if result.wrong else None)
    # As wide as it must be: a table in a file is read as it is, and a terminal scrolls.
    width = Console(width=1000).measure(table).maximum
    Console(width=max(Console().width, width)).print(table)
    for server, (p99_ms, longest_ms) in report.undisturbed_ms.items():
        print(f"{server}, no attack: p99 {p99_ms:.1f} ms, longest wait {longest_ms:.1f} ms")
    for result in report.results:
        for text in result.wrong:
            print(f"{result.row}: {text}")
    print(f"{sum(bool(result.wrong) for result in report.results)} of {len(report.results)} rows exceed a limit")
