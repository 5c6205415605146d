"""`python -m bench --against COMMIT`: this working tree and another commit of ours under the same loads.

Each round starts both servers again, because two starts of the same server may differ by some percent. Then both run
every row, one directly after the other, in random order. The results are the ratios now/before of these pairs, with
intervals and a verdict on each row (`bench/intervals.py`). A row whose verdict is settled has no further rounds.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.checkout import checkout, short_hash, snapshot
from bench.chosen import by_servers, choose, matches
from bench.contenders import Clients, Measurement, tls_flags, trees_of_ours
from bench.inside import PATHS, measure_apart
from bench.intervals import (
    CONFIDENCE,
    Interval,
    Quantity,
    RatioVerdict,
    geometric_means,
    is_acquitted,
    median_interval,
    verdict,
)
from bench.light import client_versions
from bench.light_client import LightClient
from bench.machine import (
    PERF_ANALYZER,
    Machine,
    this_machine,
)
from bench.models import write_light_models, write_onnx_models, write_python_models
from bench.progress import progress
from bench.rows import Analyzer
from bench.store import KEPT, Kept, KeptFigures, kept_line, read_kept, write_json
from bench.triton import perf_analyzer

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from rich.progress import Progress, TaskID

    from bench.chosen import AnyRow
    from bench.contenders import Contender

BEFORE, NOW = "before", "now"

#: The smallest ratios of rates that are accepted: of a row, of the CPU time inside the kernel process, and of the
#: geometric mean of all rows.
ROW_LIMIT, INSIDE_LIMIT, MEAN_LIMIT = 0.95, 0.98, 0.98

#: A row is given up when one of the servers has failed in it this many times.
FAILURE_LIMIT = 2

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
    #: By the name of the server.
    failures: dict[str, list[str]] = {}
    compared: dict[str, Compared] = {}
    #: Whether the row was stopped before the last round, because its verdict was settled.
    stopped: bool = False

    @property
    def rounds(self) -> int:
        return max((len(each) for each in self.now.values()), default=0)

    @property
    def failed(self) -> bool:
        """Whether this tree has no figures, or has failed more than once."""
        failures = len(self.failures.get(NOW, ()))
        return failures >= FAILURE_LIMIT or (failures > 0 and not self.rounds)

    def add(self, quantity: Quantity, before: float, now: float) -> None:
        """Add a round of a quantity."""
        self.before.setdefault(quantity.title, []).append(before)
        self.now.setdefault(quantity.title, []).append(now)

    def fail(self, server: str, failure: str) -> None:
        """Add a round without figures."""
        self.failures.setdefault(server, []).append(failure)

    def median(self, quantity: Quantity) -> float:
        """Return the median of a quantity of this tree, which has one."""
        return statistics.median(self.now[quantity.title])

    def ratios(self, quantity: Quantity) -> list[float]:
        """Return now/before of each round."""
        rounds = zip(self.before[quantity.title], self.now[quantity.title], strict=True)
        return [now / before for before, now in rounds]

    def is_settled(self, quantity: Quantity, rounds: int, limit: float) -> bool:
        """Return whether the rounds to come, of `rounds`, cannot change the verdict any more."""
        if any(len(each) >= FAILURE_LIMIT for each in self.failures.values()):
            return True
        ratios = self.ratios(quantity) if self.now else []
        goods = ratios if quantity is Quantity.RATE else [1 / each for each in ratios]
        return is_acquitted(goods, rounds, limit)

    def compare(self, quantity: Quantity, limit: float, *, decides: bool = True) -> None:
        """Compare all rounds of a quantity, if there are any. `decides`: it is what settles a stopped row."""
        title = quantity.title
        if title not in self.before:
            return
        ratio = median_interval(self.ratios(quantity))
        found = verdict(quantity, ratio, limit)
        if self.stopped and decides and not found.beyond_limit:
            found = RatioVerdict(f"not {quantity.beyond(limit)}, which was settled after {self.rounds} rounds")
        medians = statistics.median(self.before[title]), statistics.median(self.now[title])
        self.compared[title] = Compared(*medians, ratio, found)


class AgainstReport(msgspec.Struct, frozen=True):
    """A whole comparison, as it is stored."""

    machine: Machine
    before: str
    load: str
    rows: list[PairedRow]
    #: CPU time in the kernel process without sockets and workers (`bench/inside.py`).
    inside: list[PairedRow]
    #: The geometric mean of the rows without failures, by the title of the quantity, of the rounds that all have.
    mean: dict[str, Compared]
    #: The reasons of rows that were not measured, by name.
    skipped: dict[str, str] = {}

    @property
    def beyond_limit(self) -> dict[str, list[str]]:
        """What is worse than its limit allows, with confidence: quantities and ratios, by the name of the row."""
        every = [*((each.row, each.compared) for each in (*self.rows, *self.inside)), (_MEAN, self.mean)]
        found: dict[str, list[str]] = {}
        for name, compared in every:
            for title, each in compared.items():
                if each.verdict.beyond_limit:
                    ratio = each.ratio
                    text = f"{title} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
                    found.setdefault(name, []).append(text)
        return found

    @property
    def failed(self) -> bool:
        """Whether this tree fails in a row, or a row or the mean is beyond its limit with confidence.

        A row that only the other commit fails in is one that it did not have. A single failure beside rounds with
        figures is one of a busy machine: perf_analyzer has seen no request in a window.
        """
        return any(row.failed for row in self.rows) or bool(self.beyond_limit)

    def kept_figures(self) -> dict[str, KeptFigures]:
        """Return what is kept of each row that this tree has figures of."""
        return {
            row.row: KeptFigures(
                row.median(Quantity.RATE), row.median(Quantity.P99), row.median(Quantity.CPU), row.rounds
            )
            for row in self.rows
            if row.now
        }


def value_of(each: Measurement, quantity: Quantity) -> float:
    """Return a quantity of a measurement in requests per second or microseconds. It is never 0."""
    match quantity:
        case Quantity.RATE:
            return each.figures.rate
        case Quantity.P99:
            return each.figures.p99_us
        case Quantity.CPU:
            return max(each.main_us, _CPU_STEP_S / each.figures.requests * 1e6)


def report_of(
    machine: Machine,
    before: str,
    load: str,
    rows: Sequence[PairedRow],
    inside: Sequence[PairedRow],
    skipped: dict[str, str],
) -> AgainstReport:
    """Compare the rounds of each row, and the geometric mean of all rows without failures."""
    for row in rows:
        for quantity in Quantity:
            row.compare(quantity, ROW_LIMIT, decides=quantity is Quantity.RATE)
    for path in inside:
        path.compare(Quantity.CPU, INSIDE_LIMIT)
    whole = [row for row in rows if row.compared and not row.failures]
    # After these rounds the slow rows alone go on, whose mean would say nothing about all.
    common = min((row.rounds for row in whole), default=0)
    mean: dict[str, Compared] = {}
    for quantity in Quantity if whole else ():
        ratio = median_interval(geometric_means([row.ratios(quantity)[:common] for row in whole]))
        mean[quantity.title] = Compared(None, None, ratio, verdict(quantity, ratio, MEAN_LIMIT))
    return AgainstReport(machine, before, load, list(rows), list(inside), mean, skipped)


_UNITS = {Quantity.RATE: "requests/s", Quantity.P99: "p99 us", Quantity.CPU: "kernel CPU us"}

_MEAN = "geometric mean of the rows"


def print_report(report: AgainstReport, kept: Kept) -> None:
    """Print the figures of each row and of the mean, failures, the verdicts, and last what is beyond its limit."""
    every = [*((row.row, row.compared) for row in (*report.rows, *report.inside)), (_MEAN, report.mean)]
    lines = [(name, compared) for name, compared in every if compared]
    print(f"before: {report.before}, now: {report.machine.commit or 'this tree'}; {report.load}")
    if lines:
        _print_figures(lines, report, kept)
    for row in (*report.rows, *report.inside):
        for server, failures in row.failures.items():
            print(f"{row.row}: {len(failures)} failures of {server}, first in {failures[0]}")
    confidence = max((each.ratio.confidence for _, compared in lines for each in compared.values()), default=0.0)
    if confidence < CONFIDENCE and not any(row.stopped for row in report.rows):
        print(f"no verdicts: {CONFIDENCE:.0%} confidence needs six rounds, this run has {confidence:.0%}")
        return
    settled = {row.row for row in (*report.rows, *report.inside) if row.stopped and row.compared}
    _print_verdicts([(name, compared) for name, compared in lines if name not in settled])
    if settled:
        count = sum(bool(row.compared) for row in (*report.rows, *report.inside))
        print(f"{len(settled)} of {count} rows were settled before the last round: not beyond their limits")
    beyond = report.beyond_limit
    print("beyond the limit with confidence:" if beyond else "nothing is beyond its limit with confidence")
    for name, found in beyond.items():
        print(f"  {name}: {', '.join(found)}")


def _print_verdicts(lines: Iterable[tuple[str, dict[str, Compared]]]) -> None:
    for name, compared in lines:
        found = {title: each.verdict for title, each in compared.items() if each.verdict.confident}
        if found:
            print(f"{name}: " + "; ".join(f"{title} {each.text}" for title, each in found.items()))


def _print_figures(lines: list[tuple[str, dict[str, Compared]]], report: AgainstReport, kept: Kept) -> None:
    width = max(len(name) for name, _ in lines)
    paired = {row.row: row for row in (*report.rows, *report.inside)}
    ratios = {
        row.row: ratio
        for row in report.rows
        if row.now and (ratio := kept.ratio(row.row, row.median(Quantity.RATE), report.machine))
    }
    most = max(lines, key=lambda line: max(each.ratio.confidence for each in line[1].values()))[1]
    confidence = max(each.ratio.confidence for each in most.values())
    print(
        f"ratio: median of now/before, and the interval in which the true one lies with {confidence:.0%} confidence;"
        f" with less where a row was settled in fewer rounds\n"
    )
    print(" " * width + "        " + "".join(f"  {unit:^39}" for unit in _UNITS.values()).rstrip())
    print(
        f"{'':{width}}  rounds" + f"  {'before':>8} {'now':>8} {'ratio':>6} {'interval':>14}" * len(_UNITS) + "   kept"
    )
    for name, compared in lines:
        cells = [_cells(compared.get(quantity.title)) for quantity in Quantity]
        rounds = str(paired[name].rounds) if name in paired else ""
        print(f"{name:{width}}  {rounds:>6}" + ("".join(cells) + f"  {ratios.get(name, '')!s:>5}").rstrip())
    print()
    if line := kept_line(ratios):
        print(line)


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


class PairedPlan(msgspec.Struct, frozen=True):
    """How a comparison is made: how often, how long a window of perf_analyzer is, and what happens at its end."""

    rounds: int = 9
    window_s: float = 0.4
    #: Whether every row has all rounds, also those whose verdict is settled.
    full: bool = False
    #: Where all figures go, if anywhere.
    output: Path | None = None
    #: Whether the figures of this tree become the kept ones.
    keep: bool = False


def run(commit: str, only: str, plan: PairedPlan, generator: random.Random) -> int:
    """Measure, print figures and verdicts, write JSON. Returns 1 if `AgainstReport.failed`, else 0.

    `generator` decides which server of a pair is first. Raises `UnknownCommit`, `NotAvailable`, `ServerFailed`.
    """
    before = short_hash(commit)
    chosen = choose(only)
    inside = [path for path in PATHS if matches(only, path)]
    chosen.print_skipped()
    machine = this_machine()
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="naiad-bench-")))
        trees = {BEFORE: stack.enter_context(checkout(before)), NOW: stack.enter_context(snapshot())}
        analyzer = Analyzer(*perf_analyzer(), plan.window_s) if chosen.need_perf_analyzer else None
        clients = Clients(analyzer, stack.enter_context(LightClient()))
        for write in (write_python_models, write_light_models, write_onnx_models):
            write(temporary / "models")
        flags = tls_flags(temporary).both if chosen.need_tls else ()
        measured = Rounds(clients, chosen.rows, inside, trees, temporary / "models", generator, tls_flags=flags)
        measured.measure(plan.rounds, full=plan.full)
    load = (
        f"perf_analyzer {PERF_ANALYZER} (three windows of {plan.window_s} s), {client_versions()} (a second),"
        f" {plan.rounds} paired rounds{'' if plan.full else ', fewer for a row whose verdict is settled'}"
    )
    report = report_of(machine, before, load, [*measured.rows.values()], [*measured.inside.values()], chosen.skipped)
    kept = read_kept()
    print_report(report, kept)
    if plan.output is not None:
        write_json(plan.output, report)
    if plan.keep:
        write_json(KEPT, kept.with_rows(report.kept_figures(), machine))
        print(f"wrote {KEPT}")
    return int(report.failed)


class Rounds:
    """The rounds of a comparison, and their results."""

    def __init__(
        self,
        clients: Clients,
        rows: Sequence[AnyRow],
        inside: Sequence[str],
        trees: dict[str, Path],
        repository: Path,
        generator: random.Random,
        *,
        tls_flags: Sequence[str] = (),
    ) -> None:
        """`tls_flags` are for servers of rows with TLS."""
        self.rows = {row: PairedRow(row.name) for row in rows}
        self.inside = {path: PairedRow(path) for path in inside}
        self._clients = clients
        self._trees = trees
        self._repository = repository
        self._generator = generator
        self._tls_flags = tls_flags

    def measure(self, count: int, *, full: bool = False) -> None:
        """Measure `count` rounds, with a progress bar. Only if `full`, settled rows are measured further."""
        with progress() as shown:
            bar = shown.add_task("starting", total=count)
            for number in range(1, count + 1):
                rows = [row for row, paired in self.rows.items() if not paired.stopped]
                inside = [path for path, paired in self.inside.items() if not paired.stopped]
                steps = (len(rows) + bool(inside)) * len(self._trees)
                if not steps:
                    break
                shown.reset(bar, total=steps, description=f"round {number} of {count}")
                if inside:
                    shown.update(bar, description=f"round {number}: inside the kernel process")
                    self._measure_inside(number, inside)
                    shown.advance(bar, len(self._trees))
                for group in by_servers(rows):
                    shown.update(bar, description=f"round {number}: starting both servers")
                    flags = self._tls_flags if group[0].tls else ()
                    with trees_of_ours(self._shuffled(), self._repository, *flags) as servers:
                        self._measure_rows(number, group, servers, shown, bar)
                if not full and number < count:
                    self._stop_settled(count)

    def _measure_rows(
        self, number: int, rows: Sequence[AnyRow], servers: list[Contender], shown: Progress, bar: TaskID
    ) -> None:
        for row in rows:
            paired = self.rows[row]
            found: dict[str, Measurement] = {}
            for server in self._generator.sample(servers, len(servers)):
                shown.update(bar, description=f"round {number}: {row.name}, {server.name}")
                each = self._clients.measure(row, server)
                if isinstance(each, str):
                    paired.fail(server.name, f"round {number}: {each}")
                else:
                    found[server.name] = each
                shown.advance(bar)
            if len(found) == len(servers):
                for quantity in Quantity:
                    paired.add(quantity, value_of(found[BEFORE], quantity), value_of(found[NOW], quantity))

    def _measure_inside(self, number: int, paths: Sequence[str]) -> None:
        found = {name: measure_apart(tree) for name, tree in self._shuffled().items()}
        for path in paths:
            paired = self.inside[path]
            missing = [name for name in (BEFORE, NOW) if path not in found[name]]
            for name in missing:
                paired.fail(name, f"round {number}: bench/inside.py has no figures")
            if not missing:
                paired.add(Quantity.CPU, found[BEFORE][path], found[NOW][path])

    def _stop_settled(self, count: int) -> None:
        for row in self.rows.values():
            row.stopped = row.stopped or row.is_settled(Quantity.RATE, count, ROW_LIMIT)
        for path in self.inside.values():
            path.stopped = path.stopped or path.is_settled(Quantity.CPU, count, INSIDE_LIMIT)

    def _shuffled(self) -> dict[str, Path]:
        return dict(self._generator.sample(list(self._trees.items()), len(self._trees)))
