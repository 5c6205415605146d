"""`python -m bench --against COMMIT`: this working tree and another commit of ours under the same loads.

Each round starts both servers again, because two starts of the same server may differ by some percent. Then both run
every row, one directly after the other, in random order. The results are the ratios now/before of these pairs, see
`bench/intervals.py`. A row whose verdict is settled has no further rounds.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.against_report import (
    BEFORE,
    INSIDE_LIMIT,
    NOW,
    ROW_LIMIT,
    PairedRow,
    print_report,
    report_of,
    value_of,
)
from bench.certificate import tls_flags
from bench.checkout import checkout, short_hash, snapshot
from bench.chosen import by_servers, choose, matches
from bench.contenders import Clients, Measurement, trees_of_ours
from bench.inside_apart import PATHS, measure_apart
from bench.intervals import Quantity
from bench.kept import KEPT, read_kept
from bench.light import client_versions
from bench.light_client import LightClient
from bench.machine import PERF_ANALYZER, this_machine
from bench.models import write_light_models, write_python_models
from bench.onnx_models import write_onnx_models
from bench.progress import progress
from bench.rows import Analyzer
from bench.store import write_json
from bench.triton import perf_analyzer

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from rich.progress import Progress, TaskID

    from bench.chosen import AnyRow
    from bench.contenders import Contender


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
        """`tls_flags` are those of servers for rows with TLS."""
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
