"""The table of `python -m bench heavy`, what is stored of it, and whether a row is within its limits. Pure."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from bench.contenders import OURS, TRITON
from bench.heavy.attack import MIB
from bench.heavy.measurement import RowSample  # noqa: TC001 - msgspec reads it
from bench.machine import Machine  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.heavy.attack import HeavyRow

#: The healthy client's limits, and how many times its body, or that of its response, a request may make the main
#: process grow.
P99_LIMIT_MS, LONGEST_LIMIT_MS, GROWTH_FACTOR = 20.0, 250.0, 3

#: The p99 while several heavy requests arrive at once, each of which may take turns of the event loop and a helper's
#: share of the processors.
SEVERAL_P99_LIMIT_MS = 50.0

#: A smaller body counts as this many bytes: a process also grows by what connections and responses take.
LEAST_BODY_BYTE_SIZE = 4 * MIB

#: Pages that the main process keeps for the next request, beside its budget (`shm/blocks.py`).
KEPT_BYTE_SIZE = 2 * 128 * MIB  # in the arena of the model's inputs, and in the arena of messages for helpers


class RowVerdict(msgspec.Struct, frozen=True):
    """A row's figures relative to its limits; above 1 is too much.

    Waits are medians of the rounds. The growth is the largest of all rounds, since a process that has grown once
    grows less the next time.
    """

    p99: float
    longest: float
    growth: float
    #: What is wrong, in words; empty if nothing is.
    wrong: list[str]


def p99_limit_ms(sample: RowSample) -> float:
    """Return the limit of the healthy client's p99."""
    return P99_LIMIT_MS if sample.at_once == 1 else SEVERAL_P99_LIMIT_MS


def growth_limit(row: HeavyRow, budget_byte_size: int, sample: RowSample) -> int:
    """Return by how many bytes the main process may grow, which has `budget_byte_size` for tensors and messages."""
    if row.exceeds_budget:
        return budget_byte_size + KEPT_BYTE_SIZE + GROWTH_FACTOR * LEAST_BODY_BYTE_SIZE
    return GROWTH_FACTOR * max(sample.body_byte_size, sample.response_byte_size, LEAST_BODY_BYTE_SIZE)


def judge(row: HeavyRow, budget_byte_size: int, samples: Sequence[RowSample]) -> RowVerdict:
    """Compare the rounds of a row, at least one, with its limits."""
    p99 = statistics.median(each.p99_ms / p99_limit_ms(each) for each in samples)
    longest = statistics.median(each.longest_ms for each in samples) / LONGEST_LIMIT_MS
    growth = max(each.growth.total / growth_limit(row, budget_byte_size, each) for each in samples)
    ratios = {"p99": p99, "longest wait": longest, "growth": growth}
    wrong = [f"{name} is {ratio:.1f} times its limit" for name, ratio in ratios.items() if ratio > 1]
    for each in samples:
        if not row.accepts(each.status):
            wrong.append(f"status {each.status or 'none'}, expected {row.status}")
        if not re.search(row.text, "\n".join(each.texts)):
            wrong.append(f"{row.text!r} is not in the response")
        wrong += [f"a healthy request failed: {text}" for text in each.failures]
    return RowVerdict(p99, longest, growth, [*dict.fromkeys(wrong)])


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
