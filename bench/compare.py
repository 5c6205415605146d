"""`python -m bench rows`: our server and, if available, a real Triton under the same loads.

Every row is measured in rounds that alternate between the two servers, so that a drift of the machine affects both.
Figures are medians of the rounds: rate, latency, and the CPU time of a request. CPU time is that of the servers with
their workers, and that of perf_analyzer, which shares the processors with them. What perf_analyzer and the system use
limits the ratio that a row can reach.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.contenders import Contender, Measurement, contenders, measure
from bench.machine import PERF_ANALYZER, TRITON, this_machine
from bench.models import write_python_models
from bench.onnx_models import write_onnx_models
from bench.progress import progress
from bench.rows import Analyzer, Row, all_rows
from bench.store import write_json
from bench.triton import perf_analyzer


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
    def client_us(self) -> float:
        """CPU time of perf_analyzer per request."""
        return statistics.median(each.figures.client_cpu_s / each.figures.requests for each in self.rounds) * 1e6

    @property
    def user_us(self) -> float:
        """CPU time of the server and its workers per request in user mode."""
        return statistics.median(each.cpu.user_s / each.figures.requests for each in self.rounds) * 1e6

    @property
    def system_us(self) -> float:
        """CPU time that the system uses for the server and its workers per request."""
        return statistics.median(each.cpu.system_s / each.figures.requests for each in self.rounds) * 1e6


def run(only: str, rounds: int, window_s: float, output: Path | None, *, with_triton: bool) -> int:
    """Measure, print a table, write JSON. Returns the number of rows that failed on our server."""
    binary, environment = perf_analyzer()
    analyzer = Analyzer(binary, environment, window_s)
    rows = [row for row in all_rows() if only in row.name]
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as temporary:
        folder = Path(temporary)
        write_python_models(folder / "python")
        write_python_models(folder / "ours")
        write_onnx_models(folder / "ours")
        with contenders(folder / "ours", folder / "python" if with_triton else None) as servers:
            found = _measure_all(analyzer, rows, servers, rounds)
    processor_count = len(os.sched_getaffinity(0))
    report = [report_line(row, found[row.name], processor_count) for row in rows]
    _print_table(report)
    if output is not None:
        load = f"perf_analyzer {PERF_ANALYZER}, {rounds} rounds of three windows of {window_s} s, medians"
        settings = {"machine": machine, "triton": f"{TRITON}, Python backend", "load": load}
        write_json(output, {"settings": settings, "rows": report})
    return sum("failed" in line["ours"] for line in report)


def _measure_all(
    analyzer: Analyzer, rows: list[Row], servers: list[Contender], rounds: int
) -> dict[str, dict[str, Measured]]:
    found: dict[str, dict[str, Measured]] = {}
    with progress() as shown:
        bar = shown.add_task("measuring", total=len(rows) * rounds * len(servers))
        for row in rows:
            measured = found[row.name] = {server.name: Measured() for server in servers}
            for _ in range(rounds):
                for server in servers:
                    shown.update(bar, description=f"{row.name}, {server.name}")
                    each = measure(analyzer, row, server)
                    if isinstance(each, str):
                        measured[server.name].failure = each
                    else:
                        measured[server.name].rounds.append(each)
                    shown.advance(bar)
    return found


def report_line(row: Row, measured: dict[str, Measured], processor_count: int) -> dict[str, Any]:
    """Return the report on a row: figures by server, and ratios if both servers have figures."""
    line: dict[str, Any] = {"row": row.name}
    for name, each in measured.items():
        if each.failure or not each.rounds:
            line[name] = {"failed": each.failure or "no figures"}
            continue
        line[name] = {
            "rate": each.rate, "p99_us": each.p99_us, "rates": [r.figures.rate for r in each.rounds],
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


def _print_table(report: list[dict[str, Any]]) -> None:
    print(
        f"{'row':26} {'ours/s':>8} {'triton/s':>8} {'ratio':>6}  {'p99 us':>8} {'triton':>8} {'ratio':>6}  "
        f"{'client us':>9} {'system':>7} {'user':>6} {'limit':>6}  {'triton us':>9}"
    )
    for line in report:
        ours, theirs = line["ours"], line.get("triton", _NONE)
        if "failed" in ours:
            print(f"{line['row']:26} failed: {ours['failed']}")
            continue
        theirs = _NONE if "failed" in theirs else theirs
        cpu, their_cpu = ours["cpu_us"], theirs["cpu_us"]
        print(
            f"{line['row']:26} {ours['rate']:8.0f} {theirs['rate']:8.0f} {line.get('rate_ratio', math.nan):6.2f}  "
            f"{ours['p99_us']:8.0f} {theirs['p99_us']:8.0f} {line.get('p99_ratio', math.nan):6.2f}  "
            f"{cpu['client']:9.0f} {cpu['system']:7.0f} {cpu['user']:6.0f} {line.get('ratio_limit', math.nan):6.2f}  "
            f"{their_cpu['system'] + their_cpu['user']:9.0f}"
        )
    ratios = [line["rate_ratio"] for line in report if "rate_ratio" in line]
    if ratios:
        print(f"{len(ratios)} rows compared, geometric mean of the ratios {statistics.geometric_mean(ratios):.2f}")
