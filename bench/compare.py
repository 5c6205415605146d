"""`python -m bench rows`: our server and, if available, a real Triton under the same loads.

Every row is measured in rounds that alternate between the two servers, so that a drift of the machine affects both.
Figures are medians of the rounds: rate, latency, and the CPU time of a request. CPU time is that of the servers with
their workers, and that of the client, which shares the processors with them. What the client and the system use limits
the ratio that a row can reach.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.chosen import by_servers, choose
from bench.contenders import OURS, Clients, Contender, Measurement, TlsFlags, contenders, tls_flags
from bench.light import client_versions
from bench.light_client import LightClient
from bench.light_rows import CPP
from bench.machine import PERF_ANALYZER, TRITON, Machine, this_machine
from bench.models import write_light_models, write_onnx_models, write_python_models
from bench.progress import progress
from bench.rows import Analyzer
from bench.store import KEPT, Kept, KeptFigures, KeptRatio, kept_line, read_kept, write_json
from bench.triton import NotAvailable, onnx_backend, perf_analyzer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.progress import Progress, TaskID

    from bench.chosen import AnyRow


class RowsPlan(msgspec.Struct, frozen=True):
    """How rows are measured: how often, how long a window of perf_analyzer is, and what happens at the end."""

    rounds: int = 3
    window_s: float = 1.0
    with_triton: bool = True
    #: Where all figures go, if anywhere.
    output: Path | None = None
    #: Whether our figures become the kept ones.
    keep: bool = False


class Measured(msgspec.Struct):
    """The rounds of one row on one server."""

    rounds: list[Measurement] = []
    failure: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(each.figures.rate for each in self.rounds)

    @property
    def p99_us(self) -> float:
        return statistics.median(each.figures.p99_us for each in self.rounds)

    @property
    def main_us(self) -> float:
        """CPU time of the main process, our kernel, per request."""
        return statistics.median(each.main_us for each in self.rounds)

    @property
    def client_us(self) -> float:
        """CPU time of the client per request."""
        return statistics.median(each.figures.client_cpu_s / each.figures.requests for each in self.rounds) * 1e6

    @property
    def user_us(self) -> float:
        """CPU time of the server and its workers per request in user mode."""
        return statistics.median(each.cpu.user_s / each.figures.requests for each in self.rounds) * 1e6

    @property
    def system_us(self) -> float:
        """CPU time that the system uses for the server and its workers per request."""
        return statistics.median(each.cpu.system_s / each.figures.requests for each in self.rounds) * 1e6


def run(only: str, plan: RowsPlan) -> int:
    """Measure, print a table, write JSON. Returns the number of rows that failed on our server."""
    backend, no_cpp = None, ""
    if plan.with_triton:
        try:
            backend = onnx_backend()
        except NotAvailable as error:
            no_cpp = str(error)
    chosen = choose(only, no_cpp=no_cpp)
    chosen.print_skipped()
    machine = this_machine()
    found: dict[str, dict[str, Measured]] = {row.name: {} for row in chosen.rows}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="naiad-bench-")))
        sites = Sites(folder, backend, tls_flags(folder) if chosen.need_tls else None, with_triton=plan.with_triton)
        analyzer = Analyzer(*perf_analyzer(), plan.window_s) if chosen.need_perf_analyzer else None
        clients = Clients(analyzer, stack.enter_context(LightClient()))
        shown = stack.enter_context(progress())
        bar = shown.add_task("measuring", total=len(chosen.rows) * plan.rounds)
        for rows in by_servers(chosen.rows):
            with sites.servers(tls=rows[0].tls) as servers:
                found |= _measure_all(clients, rows, servers, plan.rounds, shown, bar)
    processor_count = len(os.sched_getaffinity(0))
    report = [report_line(row, found[row.name], processor_count) for row in chosen.rows]
    kept = read_kept()
    _print_table(report, kept, machine)
    load = (
        f"perf_analyzer {PERF_ANALYZER} (three windows of {plan.window_s} s), {client_versions()} (a second),"
        f" {plan.rounds} rounds, medians"
    )
    if plan.output is not None:
        settings = {"machine": machine, "triton": f"{TRITON}, Python backend; {CPP}: ONNX Runtime", "load": load}
        write_json(plan.output, {"settings": settings, "rows": report, "skipped": chosen.skipped})
    if plan.keep:
        write_json(KEPT, kept.with_rows(_kept_figures(found), machine))
        print(f"wrote {KEPT}")
    return sum("failed" in line["ours"] for line in report)


class Sites:
    """The two servers, started for rows with or without TLS, and their repositories in a folder."""

    def __init__(self, folder: Path, backend: Path | None, tls: TlsFlags | None, *, with_triton: bool) -> None:
        """`backend` is from `bench.triton.onnx_backend`, `tls` the flags for rows with TLS."""
        self._ours, self._theirs = folder / "ours", folder / "theirs"
        self._backend = backend
        self._tls = tls
        self._with_triton = with_triton
        for repository in (self._ours, self._theirs):
            write_python_models(repository)
            write_light_models(repository)
            if repository == self._ours or backend is not None:
                write_onnx_models(repository)

    @contextlib.contextmanager
    def servers(self, *, tls: bool) -> Iterator[list[Contender]]:
        """Run both servers, ours first; only ours if Triton is not available. Triton's HTTP has no TLS."""
        both, ours = (self._tls.grpc, self._tls.http) if tls and self._tls else ((), ())
        theirs = self._theirs if self._with_triton else None
        with contenders(self._ours, theirs, *both, our_flags=ours, onnx_backend=self._backend) as found:
            yield found


def _measure_all(
    clients: Clients, rows: Sequence[AnyRow], servers: list[Contender], rounds: int, shown: Progress, bar: TaskID
) -> dict[str, dict[str, Measured]]:
    found: dict[str, dict[str, Measured]] = {}
    for row in rows:
        with_row = [server for server in servers if server.name == OURS or row.on_triton]
        measured = found[row.name] = {server.name: Measured() for server in with_row}
        for _ in range(rounds):
            for server in with_row:
                shown.update(bar, description=f"{row.name}, {server.name}")
                each = clients.measure(row, server)
                if isinstance(each, str):
                    measured[server.name].failure = each
                else:
                    measured[server.name].rounds.append(each)
            shown.advance(bar)
    return found


def _kept_figures(found: dict[str, dict[str, Measured]]) -> dict[str, KeptFigures]:
    ours = {name: each[OURS] for name, each in found.items() if each[OURS].rounds and not each[OURS].failure}
    return {name: KeptFigures(each.rate, each.p99_us, each.main_us, len(each.rounds)) for name, each in ours.items()}


def report_line(row: AnyRow, measured: dict[str, Measured], processor_count: int) -> dict[str, Any]:
    """Return the report on a row: figures by server, and ratios if both servers have figures."""
    line: dict[str, Any] = {"row": row.name, "group": row.group}
    for name, each in measured.items():
        if each.failure or not each.rounds:
            line[name] = {"failed": each.failure or "no figures"}
            continue
        line[name] = {
            "rate": each.rate, "p99_us": each.p99_us, "rates": [r.figures.rate for r in each.rounds],
            "p50_us": statistics.median(r.figures.p50_us for r in each.rounds), "main_us": each.main_us,
            "cpu_us": {"user": each.user_us, "system": each.system_us, "client": each.client_us},
        }  # fmt: skip
    ours, theirs = line["ours"], line.get("triton", {"failed": ""})
    if "failed" not in ours and "failed" not in theirs:
        line["rate_ratio"] = ours["rate"] / theirs["rate"]
        line["p99_ratio"] = ours["p99_us"] / theirs["p99_us"]
        # The rate at which client and system would use all processors, if our own code took no time.
        most = processor_count * 1e6 / (ours["cpu_us"]["client"] + ours["cpu_us"]["system"])
        line["ratio_limit"] = most / theirs["rate"]
    return line


_NONE: dict[str, Any] = {
    "rate": math.nan, "p99_us": math.nan, "cpu_us": {"user": math.nan, "system": math.nan, "client": math.nan},
}  # fmt: skip


def _print_table(report: list[dict[str, Any]], kept: Kept, machine: Machine) -> None:
    width = max([26, *(len(line["row"]) for line in report)])
    print(
        f"{'row':{width}} {'ours/s':>8} {'triton/s':>8} {'ratio':>6}  {'p99 us':>8} {'triton':>8} {'ratio':>6}  "
        f"{'client us':>9} {'system':>7} {'user':>6} {'kernel':>6} {'limit':>6}  {'triton us':>9}   kept"
    )
    ratios: dict[str, KeptRatio] = {}
    for line in report:
        ours, theirs = line["ours"], line.get("triton", _NONE)
        if "failed" in ours:
            print(f"{line['row']:{width}} failed: {ours['failed']}")
            continue
        failure = theirs.get("failed", "")
        theirs = _NONE if failure else theirs
        if ratio := kept.ratio(line["row"], ours["rate"], machine):
            ratios[line["row"]] = ratio
        cpu, their_cpu = ours["cpu_us"], theirs["cpu_us"]
        print(
            f"{line['row']:{width}} {ours['rate']:8.0f} {theirs['rate']:8.0f} {line.get('rate_ratio', math.nan):6.2f}  "
            f"{ours['p99_us']:8.0f} {theirs['p99_us']:8.0f} {line.get('p99_ratio', math.nan):6.2f}  "
            f"{cpu['client']:9.0f} {cpu['system']:7.0f} {cpu['user']:6.0f} {ours['main_us']:6.0f} "
            f"{line.get('ratio_limit', math.nan):6.2f}  {their_cpu['system'] + their_cpu['user']:9.0f}  "
            f"{ratios.get(line['row'], '')!s:>5}".rstrip()
        )
        if failure:
            print(f"{'':{width}} Triton has no figures: {failure}")
    for text in filter(None, (*mean_lines(report), kept_line(ratios))):
        print(text)


def mean_lines(report: list[dict[str, Any]]) -> list[str]:
    """Return a line for the geometric mean of the ratios to Triton of all rows, and for the mean of each group."""
    compared = [line for line in report if "rate_ratio" in line]
    groups = list(dict.fromkeys(line["group"] for line in compared))
    lines = []
    for group in ("", *(groups if len(groups) > 1 else ())):
        ratios = [line["rate_ratio"] for line in compared if group in ("", line["group"])]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(
                f"{len(ratios)} rows compared{group and f' ({group})'}, geometric mean of the ratios {mean:.2f}"
            )
    return lines
