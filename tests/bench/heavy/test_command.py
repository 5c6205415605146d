"""`python -m bench heavy` from its servers to its table and file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench import store
from bench.contenders import OURS, TRITON
from bench.heavy import command
from bench.heavy.attack import MIB
from bench.heavy.report import HeavyReport, HeavyResult, judge, print_report
from bench.store import read_json
from tests.bench.conftest import MACHINE
from tests.bench.heavy.report_rows import row, sample

if TYPE_CHECKING:
    from pathlib import Path


def report(*, with_triton: bool) -> HeavyReport:
    good, bad = sample(), sample(longest_ms=1000)
    theirs = {TRITON: [sample(p99_ms=77)]} if with_triton else {}
    results = [
        HeavyResult("good", {OURS: [good], **theirs}, verdict=judge(row(), 360 * MIB, [good])),
        HeavyResult("bad", {OURS: [bad], **theirs}, verdict=judge(row(), 360 * MIB, [bad])),
        HeavyResult("not measured", {}, {OURS: "a client has ended"}),
    ]
    triton = "2.51.0" if with_triton else ""
    return HeavyReport(MACHINE, 1, 60 * MIB, 200, ["--flag"], triton, {OURS: (1.0, 2.0)}, results, {"p99_ms": 20.0})


@pytest.mark.parametrize("with_triton", [True, False])
def test_the_table_has_every_row_and_says_what_is_wrong(capsys: pytest.CaptureFixture[str], with_triton: bool) -> None:
    print_report(report(with_triton=with_triton))
    lines = capsys.readouterr().out.splitlines()
    assert ("Triton p99 ms" in "".join(lines)) is with_triton
    assert any(("77" in line) is with_triton for line in lines if "good" in line)
    assert any("4.00" in line for line in lines if "bad" in line)
    assert "bad: longest wait is 4.0 times its limit" in lines
    assert "not measured: a client has ended" in lines
    assert lines[-1] == "2 of 3 rows exceed a limit"


@pytest.mark.parametrize("rounds", [2])
def test_a_row_is_measured_in_rounds_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rounds: int
) -> None:
    monkeypatch.setattr(store, "QUICK", tmp_path)
    monkeypatch.setattr(command, "UNDISTURBED_S", 0.5)
    monkeypatch.setattr(command, "LEAST_S", 0.5)
    monkeypatch.setattr(command, "BODY_BYTE_SIZE", MIB)
    code = command.run("grpc gzip in gzip", rounds, with_triton=False)
    stored = read_json(tmp_path / "heavy.json", HeavyReport)
    (result,) = stored.results
    assert result.row == "grpc gzip in gzip"
    assert [each.status for each in result.samples[OURS]] == ["INTERNAL"] * rounds
    assert all(each.requests for one in result.samples[OURS] for each in one.waits.values())
    assert code == bool(result.wrong)
    assert "grpc gzip in gzip" in capsys.readouterr().out
