"""Two commits in paired rounds: the order of measurements, the comparison, and the report."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench import against, store
from bench.against import BEFORE, NOW, AgainstReport, PairedRow, Rounds, print_report, report_of
from bench.contenders import Contender, Measurement
from bench.inside_apart import PATHS
from bench.intervals import Quantity
from bench.machine import ProcessTimes
from bench.rows import Analyzer, Figures, Row
from tests.bench.conftest import MACHINE

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = [Row("small http c=8", "add_sub", "http", 8), Row("small grpc c=8", "add_sub", "grpc", 8)]
ANALYZER = Analyzer(Path("perf_analyzer"), {})
TREES = {BEFORE: Path("old"), NOW: Path("new")}


def measurement(rate: float, p99_us: float = 1000, main_us: float = 40) -> Measurement:
    times = ProcessTimes(user_s=main_us * 1000 / 1e6), ProcessTimes(system_s=1.0)
    return Measurement(Figures(rate, 500, p99_us, 1000), *times)


class FakeServers:
    """Fake servers and loads with given figures. It records what is started and measured, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.figures: dict[str, Measurement | str] = {BEFORE: measurement(10_000), NOW: measurement(9_000)}
        self.inside: dict[str, dict[str, float]] = {"old": dict.fromkeys(PATHS, 20.0), "new": dict.fromkeys(PATHS, 10)}
        monkeypatch.setattr(against, "trees_of_ours", self.trees_of_ours)
        monkeypatch.setattr(against, "measure", self.measure)
        monkeypatch.setattr(against, "measure_apart", lambda tree: self.inside[str(tree)])

    @contextlib.contextmanager
    def trees_of_ours(self, trees: dict[str, Path], repository: Path) -> Iterator[list[Contender]]:
        assert trees == TREES
        self.log.append("start")
        yield [Contender(name, {}, 0) for name in trees]
        self.log.append("stop")

    def measure(self, analyzer: Analyzer, row: Row, server: Contender) -> Measurement | str:
        self.log.append(server.name)
        return self.figures[server.name]

    def report(self, rounds: int, *, inside: tuple[str, ...] = (), seed: int = 0) -> AgainstReport:
        measured = Rounds(ANALYZER, ROWS, inside, TREES, Path("models"), random.Random(seed))
        measured.measure(rounds)
        return report_of(MACHINE, "abc", "a load", measured)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    return FakeServers(monkeypatch)


def test_each_round_starts_both_servers_again_and_measures_each_row_in_pairs(servers: FakeServers) -> None:
    servers.report(rounds=5)
    assert len(servers.log) == 5 * 6
    for number in range(5):
        start, *measured, stop = servers.log[number * 6 : number * 6 + 6]
        assert (start, stop) == ("start", "stop")
        assert {*measured[:2]} == {*measured[2:]} == {BEFORE, NOW}


def test_the_order_is_random_and_that_of_the_generator(servers: FakeServers) -> None:
    orders = []
    for seed in (1, 1, 2):
        servers.log.clear()
        servers.report(rounds=8, seed=seed)
        orders.append(servers.log.copy())
    assert orders[0] == orders[1] != orders[2]
    firsts = [pair[0] for pair in zip(orders[0][1::6], orders[0][2::6], strict=True)]
    assert {*firsts} == {BEFORE, NOW}


def test_ratios_are_those_of_now_to_before(servers: FakeServers) -> None:
    servers.figures = {BEFORE: measurement(10_000, 1000, 40), NOW: measurement(9_000, 1500, 30)}
    report = servers.report(rounds=6)
    for compared in (report.rows[0].compared, report.mean):
        ratios = {title: each.ratio.median for title, each in compared.items()}
        assert ratios == pytest.approx({"rate": 0.9, "p99": 1.5, "kernel CPU": 0.75})
    assert report.rows[0].compared["rate"].before == 10_000
    assert report.rows[0].compared["rate"].now == 9_000


def test_a_row_below_its_limit_fails_the_comparison(servers: FakeServers) -> None:
    assert servers.report(rounds=6).failed
    assert not servers.report(rounds=5).failed  # too few to be sure
    servers.figures[NOW] = measurement(9_900)
    assert not servers.report(rounds=6).failed


def test_a_mean_below_its_limit_fails_where_no_row_does(servers: FakeServers) -> None:
    servers.figures[NOW] = measurement(9_600)
    report = servers.report(rounds=6)
    assert not any(each.verdict.beyond_limit for row in report.rows for each in row.compared.values())
    assert report.failed


def test_a_round_without_figures_is_left_out_and_its_row_is_not_in_the_mean(servers: FakeServers) -> None:
    servers.figures[NOW] = "perf_analyzer did not end"
    report = servers.report(rounds=2)
    assert report.rows[0].failures == [f"round {number}, now: perf_analyzer did not end" for number in (1, 2)]
    assert (report.rows[0].compared, report.mean) == ({}, {})
    assert report.failed


def test_cpu_time_below_a_step_of_the_clock_is_not_zero() -> None:
    assert against.value_of(measurement(1000, main_us=0), Quantity.CPU) > 0


def test_a_request_inside_the_kernel_process_is_compared_by_its_cpu_time(servers: FakeServers) -> None:
    report = servers.report(rounds=6, inside=PATHS)
    assert [row.row for row in report.inside] == list(PATHS)
    assert {title: each.ratio.median for title, each in report.inside[0].compared.items()} == {"kernel CPU": 0.5}


def test_a_commit_without_that_measurement_does_not_fail_the_comparison(servers: FakeServers) -> None:
    servers.inside["old"] = {}
    servers.figures[NOW] = servers.figures[BEFORE]
    report = servers.report(rounds=6, inside=PATHS[:1])
    assert report.inside[0].failures[0] == "round 1, before: bench/inside.py has no figures"
    assert not report.failed


def test_a_report_has_figures_and_a_verdict_for_each_row(
    servers: FakeServers, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(servers.report(rounds=6, inside=PATHS))
    printed = capsys.readouterr().out
    assert "97% confidence" in printed
    for name in (*(row.name for row in ROWS), *PATHS, "geometric mean of the rows"):
        figures, judged = [line for line in printed.splitlines() if line.startswith(name)]
        assert " 0.500 " in figures if name in PATHS else " 0.900 " in figures
        assert "kernel CPU less with confidence" in judged if name in PATHS else "rate lower with" in judged


def test_with_few_rounds_the_report_has_no_verdicts(servers: FakeServers, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(servers.report(rounds=3))
    printed = capsys.readouterr().out
    assert printed.count("no verdicts: 95% confidence needs six rounds, this run has 75%") == 1
    assert "with confidence" not in printed


def test_a_stored_comparison_is_read_again(servers: FakeServers, tmp_path: Path) -> None:
    report = servers.report(rounds=2, inside=PATHS)
    store.write_json(tmp_path / "against.json", report)
    assert store.read_json(tmp_path / "against.json", AgainstReport) == report


def test_a_row_keeps_every_round(servers: FakeServers) -> None:
    row: PairedRow = servers.report(rounds=2).rows[0]
    assert (row.before["rate"], row.now["rate"]) == ([10_000, 10_000], [9_000, 9_000])
    assert msgspec.to_builtins(row)["now"]["p99"] == [1000, 1000]
