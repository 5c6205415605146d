"""Two commits in paired rounds: the order of measurements, the comparison, and the report."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench import against, store
from bench.against import BEFORE, NOW, AgainstReport, PairedRow, Rounds, print_report, report_of, value_of
from bench.contenders import Clients, Contender, Measurement
from bench.inside import PATHS
from bench.intervals import Quantity
from bench.light_client import LightClient
from bench.light_rows import light_rows
from bench.machine import ProcessTimes
from bench.rows import Analyzer, Figures, Row
from bench.store import Kept
from tests.bench.conftest import MACHINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.chosen import AnyRow

    Rows = Sequence[AnyRow]

ROWS = [Row("small http c=8", "add_sub", "http", 8), Row("small grpc c=8", "add_sub", "grpc", 8)]
TLS_ROWS = [row for row in light_rows() if row.tls]
CLIENTS = Clients(Analyzer(Path("perf_analyzer"), {}), LightClient())
TREES = {BEFORE: Path("old"), NOW: Path("new")}


def measurement(rate: float, p99_us: float = 1000, main_us: float = 40) -> Measurement:
    times = ProcessTimes(user_s=main_us * 1000 / 1e6), ProcessTimes(system_s=1.0)
    return Measurement(Figures(rate, 500, p99_us, 1000), *times)


class FakeServers:
    """Fake servers and loads with given figures. It records what is started and measured, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        #: Measurements by row, of both servers.
        self.measured: dict[str, int] = {}
        #: Figures of one row on one server that are not those of the others.
        self.row_figures: dict[tuple[str, str], Measurement | str] = {}
        self.figures: dict[str, Measurement | str] = {BEFORE: measurement(10_000), NOW: measurement(9_000)}
        self.inside: dict[str, dict[str, float]] = {"old": dict.fromkeys(PATHS, 20.0), "new": dict.fromkeys(PATHS, 10)}
        monkeypatch.setattr(against, "trees_of_ours", self.trees_of_ours)
        monkeypatch.setattr(Clients, "measure", lambda _, row, server: self.measure(row, server))
        monkeypatch.setattr(against, "measure_apart", lambda tree: self.inside[str(tree)])

    @contextlib.contextmanager
    def trees_of_ours(self, trees: dict[str, Path], repository: Path, *flags: str) -> Iterator[list[Contender]]:
        assert trees == TREES
        self.log.append(" ".join(["start", *flags]))
        yield [Contender(name, {}, 0) for name in trees]
        self.log.append("stop")

    def measure(self, row: AnyRow, server: Contender) -> Measurement | str:
        self.log.append(server.name)
        self.measured[row.name] = self.measured.get(row.name, 0) + 1
        return self.row_figures.get((row.name, server.name), self.figures[server.name])

    def report(
        self, rounds: int, *, inside: tuple[str, ...] = (), seed: int = 0, full: bool = True, rows: Rows = ROWS
    ) -> AgainstReport:
        flags = ("--tls",)
        measured = Rounds(CLIENTS, rows, inside, TREES, Path("models"), random.Random(seed), tls_flags=flags)
        measured.measure(rounds, full=full)
        return report_of(MACHINE, "abc", "a load", [*measured.rows.values()], [*measured.inside.values()], {})


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
    servers.figures[NOW] = measurement(9_700)
    report = servers.report(rounds=6)
    assert not any(each.verdict.beyond_limit for row in report.rows for each in row.compared.values())
    assert report.failed


def test_a_round_without_figures_is_left_out_and_its_row_is_not_in_the_mean(servers: FakeServers) -> None:
    servers.figures[NOW] = "perf_analyzer did not end"
    report = servers.report(rounds=2)
    assert report.rows[0].failures == {NOW: [f"round {number}: perf_analyzer did not end" for number in (1, 2)]}
    assert (report.rows[0].compared, report.mean) == ({}, {})
    assert report.failed


def test_cpu_time_below_a_step_of_the_clock_is_not_zero() -> None:
    assert value_of(measurement(1000, main_us=0), Quantity.CPU) > 0


def test_a_request_inside_the_kernel_process_is_compared_by_its_cpu_time(servers: FakeServers) -> None:
    report = servers.report(rounds=6, inside=PATHS)
    assert [row.row for row in report.inside] == list(PATHS)
    assert {title: each.ratio.median for title, each in report.inside[0].compared.items()} == {"kernel CPU": 0.5}


def test_a_commit_without_that_measurement_does_not_fail_the_comparison(servers: FakeServers) -> None:
    servers.inside["old"] = {}
    servers.figures[NOW] = servers.figures[BEFORE]
    report = servers.report(rounds=6, inside=PATHS[:1])
    assert report.inside[0].failures[BEFORE][0] == "round 1: bench/inside.py has no figures"
    assert not report.failed


def test_a_report_has_figures_and_a_verdict_for_each_row(
    servers: FakeServers, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(servers.report(rounds=6, inside=PATHS), Kept())
    printed = capsys.readouterr().out
    assert "97% confidence" in printed
    for name in (*(row.name for row in ROWS), *PATHS, "geometric mean of the rows"):
        figures, judged = [line for line in printed.splitlines() if line.startswith(name)]
        assert " 0.500 " in figures if name in PATHS else " 0.900 " in figures
        assert "kernel CPU less with confidence" in judged if name in PATHS else "rate lower with" in judged


def test_with_few_rounds_the_report_has_no_verdicts(servers: FakeServers, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(servers.report(rounds=3), Kept())
    printed = capsys.readouterr().out
    assert printed.count("no verdicts: 95% confidence needs six rounds, this run has 75%") == 1
    assert "with confidence" not in printed


def test_a_stored_comparison_is_read_again(servers: FakeServers, tmp_path: Path) -> None:
    report = servers.report(rounds=2, inside=PATHS)
    store.write_json(tmp_path / "against.json", report)
    assert store.read_json(tmp_path / "against.json", AgainstReport) == report


def test_a_row_that_only_the_other_commit_fails_in_does_not_fail_the_comparison(servers: FakeServers) -> None:
    servers.figures[BEFORE] = "unknown model"
    report = servers.report(rounds=6, full=False)
    assert not report.failed
    assert report.rows[0].failures == {BEFORE: ["round 1: unknown model", "round 2: unknown model"]}


def test_a_single_failure_of_this_tree_beside_rounds_with_figures_does_not_fail_the_comparison() -> None:
    row = PairedRow("small")
    row.fail(NOW, "round 1: no request in a window")
    assert row.failed
    row.add(Quantity.RATE, 1.0, 1.0)
    assert not row.failed
    row.fail(NOW, "round 3: no request in a window")
    assert row.failed


def test_a_row_has_no_further_rounds_when_they_could_not_change_its_verdict(servers: FakeServers) -> None:
    servers.figures[NOW] = servers.figures[BEFORE]
    slow, fast = ROWS[0].name, ROWS[1].name
    servers.row_figures[slow, NOW] = measurement(9_000)
    report = servers.report(rounds=9, full=False)
    assert servers.measured == {slow: 2 * 9, fast: 2 * 2}
    assert [row.rounds for row in report.rows] == [9, 2]
    assert report.failed
    assert report.beyond_limit == {slow: ["rate 0.900 (0.900 to 0.900)"]}
    assert report.rows[1].compared["rate"].verdict.text == "not below 0.95, which was settled after 2 rounds"


def test_settled_rows_are_only_counted_in_the_verdicts(
    servers: FakeServers, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.figures[NOW] = servers.figures[BEFORE]
    print_report(servers.report(rounds=9, full=False), Kept())
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [
        "2 of 2 rows were settled before the last round: not beyond their limits",
        "nothing is beyond its limit with confidence",
    ]


def test_servers_are_not_started_for_rounds_that_nothing_needs(servers: FakeServers) -> None:
    servers.figures[NOW] = servers.figures[BEFORE]
    servers.report(rounds=9, full=False)
    assert servers.log.count("start") == 2


def test_all_rounds_of_a_settled_row_are_measured_on_demand(servers: FakeServers) -> None:
    servers.figures[NOW] = servers.figures[BEFORE]
    assert [row.rounds for row in servers.report(rounds=9, full=True).rows] == [9, 9]


def test_the_mean_is_that_of_the_rounds_that_all_rows_have(servers: FakeServers) -> None:
    servers.figures[NOW] = servers.figures[BEFORE]
    servers.row_figures[ROWS[0].name, NOW] = measurement(4_900)
    mean = servers.report(rounds=9, full=False).mean["rate"]
    assert mean.ratio.median == pytest.approx(0.7)
    assert not mean.verdict.confident


def test_rows_with_tls_have_servers_of_their_own(servers: FakeServers) -> None:
    servers.report(rounds=1, rows=[TLS_ROWS[0], *ROWS])
    assert [each for each in servers.log if each.startswith("st")] == ["start", "stop", "start --tls", "stop"]


def test_the_report_names_what_is_beyond_its_limit_and_the_ratio_to_the_kept_figures(
    servers: FakeServers, capsys: pytest.CaptureFixture[str]
) -> None:
    report = servers.report(rounds=6)
    kept = Kept().with_rows(report.kept_figures(), report.machine)
    assert kept.rows[ROWS[0].name].figures.rate == 9_000
    print_report(report, kept)
    printed = capsys.readouterr().out.splitlines()
    last = printed.index("beyond the limit with confidence:") + 1
    assert printed[last] == f"  {ROWS[0].name}: rate 0.900 (0.900 to 0.900)"
    assert printed[-1] == "  geometric mean of the rows: rate 0.900 (0.900 to 0.900)"
    assert next(line for line in printed if line.startswith(ROWS[0].name)).endswith(" 1.00")


def test_a_row_keeps_every_round(servers: FakeServers) -> None:
    row: PairedRow = servers.report(rounds=2).rows[0]
    assert (row.before["rate"], row.now["rate"]) == ([10_000, 10_000], [9_000, 9_000])
    assert msgspec.to_builtins(row)["now"]["p99"] == [1000, 1000]
