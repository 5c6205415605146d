"""The report on a row: medians, CPU time of a request, ratios, and the ratio that client and system allow."""

from __future__ import annotations

from typing import Any

import pytest

from bench.compare import Measured, mean_lines, report_line
from bench.contenders import Measurement
from bench.machine import ProcessTimes
from bench.rows import Figures, Row

ROW = Row("small http c=8", "add_sub", "http", 8)
OURS = Measured([
    Measurement(Figures(20_000, 300, 800, 1000, client_cpu_s=0.04), ProcessTimes(0.02, 0.01), ProcessTimes(0.01, 0.0))
])  # fmt: skip
TRITON = Measured([
    Measurement(Figures(10_000, 600, 1600, 1000, client_cpu_s=0.04), ProcessTimes(0.05, 0.02), ProcessTimes(0.03, 0.0))
])  # fmt: skip


def test_cpu_time_is_that_of_one_request() -> None:
    line = report_line(ROW, {"ours": OURS}, processor_count=2)
    assert line["ours"]["cpu_us"] == pytest.approx({"user": 30, "system": 10, "client": 40})
    assert "rate_ratio" not in line


def test_client_and_system_alone_limit_the_ratio() -> None:
    line = report_line(ROW, {"ours": OURS, "triton": TRITON}, processor_count=2)
    assert line["rate_ratio"] == 2
    assert line["p99_ratio"] == 0.5
    # 50 us of two processors for each request: 40,000 a second.
    assert line["ratio_limit"] == pytest.approx(4)


def test_a_server_without_figures_has_the_reason_in_its_place() -> None:
    line = report_line(ROW, {"ours": Measured(failure="no response"), "triton": TRITON}, processor_count=2)
    assert line["ours"] == {"failed": "no response"}
    assert "ratio_limit" not in line


def test_each_group_has_a_geometric_mean_beside_that_of_all_rows() -> None:
    rows: list[dict[str, Any]] = [{"group": "a", "rate_ratio": 2.0}, {"group": "b", "rate_ratio": 8.0}, {"group": "b"}]
    assert mean_lines(rows) == [
        "2 rows compared, geometric mean of the ratios 4.00",
        "1 rows compared (a), geometric mean of the ratios 2.00",
        "1 rows compared (b), geometric mean of the ratios 8.00",
    ]
    assert len(mean_lines(rows[:1])) == 1
    assert mean_lines([]) == []
