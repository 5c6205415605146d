"""`python -m bench --against COMMIT`: this working tree and another commit of ours under the same loads.

Each round starts both servers again, because two starts of the same server may differ by some percent. Then both run
every row, one directly after the other, in random order. The results are the ratios now/before of these pairs, see
`bench/intervals.py`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.checkout import checkout, short_hash, snapshot
from bench.contenders import Measurement, measure, trees_of_ours
from bench.inside_apart import PATHS, measure_apart
from bench.intervals import CONFIDENCE, Interval, Quantity, RatioVerdict, geometric_means, median_interval, verdict
from bench.machine import PERF_ANALYZER, Machine, this_machine
from bench.models import write_python_models
from bench.onnx_models import write_onnx_models
from bench.progress import progress
from bench.rows import Analyzer, Row, all_rows
from bench.store import write_json
from bench.triton import perf_analyzer

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from rich.progress import Progress, TaskID

    from bench.contenders import Contender

BEFORE, NOW = "before", "now"

#: The smallest ratios of rates that are accepted: of a row, and of the geometric mean of all rows.
ROW_LIMIT, MEAN_LIMIT = 0.93, 0.98

#: The system counts CPU time in steps of this size. A process that has used less seems to have used none.
_CPU_STEP_S = 1 / os.sysconf("SC_CLK_TCK")


class Compared(msgspec.Struct, frozen=True):
    """A quantity of one row or of all rows: the medians (None for all rows), the ratio now/before, and a verdict."""

    before: float | None
    now: float | None
    ratio: Interval
    verdict: RatioVerdict


class PairedRow(msgspec.Struct):
    """The rounds of one row in which both servers had figures, and the failures of the other rounds."""

    row: str
    #: A value for each round, by the title of the quantity.
    before: dict[str, list[float]] = {}
    now: dict[str, list[float]] = {}
    failures: list[str] = []
    compared: dict[str, Compared] = {}

    def add(self, quantity: Quantity, before: float, now: float) -> None:
        """Add a round of a quantity."""
        self.before.setdefault(quantity.title, []).append(before)
        self.now.setdefault(quantity.title, []).append(now)

    def ratios(self, quantity: Quantity) -> list[float]:
        """Return now/before of each round."""
        rounds = zip(self.before[quantity.title], self.now[quantity.title], strict=True)
        return [now / before for before, now in rounds]

    def compare(self, quantity: Quantity, limit: float) -> None:
        """Compare all rounds of a quantity, if there are any."""
        title = quantity.title
        if title in self.before:
            ratio = median_interval(self.ratios(quantity))
            medians = statistics.median(self.before[title]), statistics.median(self.now[title])
            self.compared[title] = Compared(*medians, ratio, verdict(quantity, ratio, limit))


class AgainstReport(msgspec.Struct, frozen=True):
    """A whole comparison, as it is stored."""

    machine: Machine
    before: str
    load: str
    rows: list[PairedRow]
    #: CPU time in the kernel process without sockets and workers (`bench/inside.py`).
    inside: list[PairedRow]
    #: The geometric mean of the rows without failures, by the title of the quantity.
    mean: dict[str, Compared]

    @property
    def failed(self) -> bool:
        """Whether a row has failures, or a row or the mean is beyond its limit with confidence."""
        every = [*self.mean.values()]
        for each in (*self.rows, *self.inside):
            every += each.compared.values()
        return any(row.failures for row in self.rows) or any(each.verdict.beyond_limit for each in every)


def run(commit: str, only: str, rounds: int, window_s: float, output: Path | None, generator: random.Random) -> int:
    """Measure, print figures and verdicts, write JSON. Returns 1 if `AgainstReport.failed`, else 0.

    `generator` decides which server of a pair is first. Raises `UnknownCommit`, `NotAvailable`, `ServerFailed`.
    """
    before = short_hash(commit)
    analyzer = Analyzer(*perf_analyzer(), window_s)
    rows = [row for row in all_rows() if only in row.name]
    inside = [path for path in PATHS if only in path]
    machine = this_machine()
    with (
        tempfile.TemporaryDirectory(prefix="naiad-bench-") as temporary,
        checkout(before) as before_tree,
        snapshot() as now_tree,
    ):
        repository = Path(temporary)
        write_python_models(repository)
        write_onnx_models(repository)
        trees = {BEFORE: before_tree, NOW: now_tree}
        measured = Rounds(analyzer, rows, inside, trees, repository, generator)
        measured.measure(rounds)
    load = f"perf_analyzer {PERF_ANALYZER}, {rounds} paired rounds of three windows of {window_s} s"
    report = report_of(machine, before, load, measured)
    print_report(report)
    if output is not None:
        write_json(output, report)
    return int(report.failed)


class Rounds:
    """The rounds of a comparison, and their results."""

    def __init__(
        self,
        analyzer: Analyzer,
        rows: list[Row],
        inside: Sequence[str],
        trees: dict[str, Path],
        repository: Path,
        generator: random.Random,
    ) -> None:
        self.rows = {row: PairedRow(row.name) for row in rows}
        self.inside = {path: PairedRow(path) for path in inside}
        self._analyzer = analyzer
        self._trees = trees
        self._repository = repository
        self._generator = generator

    def measure(self, count: int) -> None:
        """Measure `count` rounds, with a progress bar."""
        steps = len(self.rows) + bool(self.inside)
        with progress() as shown:
            bar = shown.add_task("starting", total=count * steps * len(self._trees))
            for number in range(1, count + 1):
                if self.inside:
                    shown.update(bar, description=f"round {number}: inside the kernel process")
                    self._measure_inside(number)
                    shown.advance(bar, len(self._trees))
                if self.rows:
                    shown.update(bar, description=f"round {number}: starting both servers")
                    with trees_of_ours(self._shuffled(), self._repository) as servers:
                        self._measure_rows(number, servers, shown, bar)

    def _measure_rows(self, number: int, servers: list[Contender], shown: Progress, bar: TaskID) -> None:
        for row, paired in self.rows.items():
            found: dict[str, Measurement] = {}
            for server in self._generator.sample(servers, len(servers)):
                shown.update(bar, description=f"round {number}: {row.name}, {server.name}")
                each = measure(self._analyzer, row, server)
                if isinstance(each, str):
                    paired.failures.append(f"round {number}, {server.name}: {each}")
                else:
                    found[server.name] = each
                shown.advance(bar)
            if len(found) == len(servers):
                for quantity in Quantity:
                    paired.add(quantity, value_of(found[BEFORE], quantity), value_of(found[NOW], quantity))

    def _measure_inside(self, number: int) -> None:
        found = {name: measure_apart(tree) for name, tree in self._shuffled().items()}
        for path, paired in self.inside.items():
            missing = [name for name in (BEFORE, NOW) if path not in found[name]]
            paired.failures += [f"round {number}, {name}: bench/inside.py has no figures" for name in missing]
            if not missing:
                paired.add(Quantity.CPU, found[BEFORE][path], found[NOW][path])

    def _shuffled(self) -> dict[str, Path]:
        return dict(self._generator.sample(list(self._trees.items()), len(self._trees)))


def value_of(each: Measurement, quantity: Quantity) -> float:
    """Return a quantity of a measurement in requests per second or microseconds. It is never 0."""
    match quantity:
        case Quantity.RATE:
            return each.figures.rate
        case Quantity.P99:
            return each.figures.p99_us
        case Quantity.CPU:
            return max(each.main_us, _CPU_STEP_S / each.figures.requests * 1e6)


def report_of(machine: Machine, before: str, load: str, measured: Rounds) -> AgainstReport:
    """Compare the rounds of each row, and the geometric mean of all rows without failures."""
    rows, inside = list(measured.rows.values()), list(measured.inside.values())
    for row in rows:
        for quantity in Quantity:
            row.compare(quantity, ROW_LIMIT)
    for path in inside:
        path.compare(Quantity.CPU, MEAN_LIMIT)
    whole = [row for row in rows if row.compared and not row.failures]
    mean: dict[str, Compared] = {}
    for quantity in Quantity if whole else ():
        ratio = median_interval(geometric_means([row.ratios(quantity) for row in whole]))
        mean[quantity.title] = Compared(None, None, ratio, verdict(quantity, ratio, MEAN_LIMIT))
    return AgainstReport(machine, before, load, rows, inside, mean)


_UNITS = {Quantity.RATE: "requests/s", Quantity.P99: "p99 us", Quantity.CPU: "kernel CPU us"}
_MEAN = "geometric mean of the rows"


def print_report(report: AgainstReport) -> None:
    """Print the figures of each row and of the mean, then failures, then the verdicts."""
    every = [*((row.row, row.compared) for row in (*report.rows, *report.inside)), (_MEAN, report.mean)]
    lines = [(name, compared) for name, compared in every if compared]
    print(f"before: {report.before}, now: {report.machine.commit or 'this tree'}; {report.load}")
    if lines:
        _print_figures(lines)
    for row in (*report.rows, *report.inside):
        if row.failures:
            print(f"{row.row}: {len(row.failures)} failures, first in {row.failures[0]}")
    confidence = max((each.ratio.confidence for _, compared in lines for each in compared.values()), default=0.0)
    if confidence < CONFIDENCE:
        print(f"no verdicts: {CONFIDENCE:.0%} confidence needs six rounds, this run has {confidence:.0%}")
        return
    for name, compared in lines:
        print(f"{name}: " + "; ".join(f"{title} {each.verdict.text}" for title, each in compared.items()))


def _print_figures(lines: list[tuple[str, dict[str, Compared]]]) -> None:
    width = max(len(name) for name, _ in lines)
    confidence = min(each.ratio.confidence for _, compared in lines for each in compared.values())
    print(
        f"ratio: median of now/before, and the interval in which the true one lies with {confidence:.0%} confidence\n"
    )
    print(" " * width + "".join(f"  {unit:^39}" for unit in _UNITS.values()).rstrip())
    print(f"{'':{width}}" + f"  {'before':>8} {'now':>8} {'ratio':>6} {'interval':>14}" * len(_UNITS))
    for name, compared in lines:
        cells = [_cells(compared.get(quantity.title)) for quantity in Quantity]
        print(f"{name:{width}}" + "".join(cells).rstrip())
    print()


def _cells(compared: Compared | None) -> str:
    if compared is None:
        return " " * 41
    ratio = compared.ratio
    interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return f"  {_median(compared.before):>8} {_median(compared.now):>8} {ratio.median:6.3f} {interval:>14}"


def _median(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
