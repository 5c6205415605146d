"""perf_analyzer's report is read, and a run without figures gives the reason."""

from __future__ import annotations

from bench.rows import Figures, all_rows, parse_report

REPORT = """*** Measurement Settings ***
  Batch size: 1
Request concurrency: 4
  Client:
    Request count: 8123
    Throughput: 2708.36 infer/sec
    p50 latency: 1432 usec
    p90 latency: 1720 usec
    p99 latency: 2101 usec
    Avg HTTP time: 1470 usec
  Server:
    Inference count: 8124
    Successful request count: 8124
Inferences/Second vs. Client Average Batch Latency
"""


def test_the_figures_of_a_report_are_those_of_the_client() -> None:
    assert parse_report(REPORT) == Figures(2708.36, 1432.0, 2101.0, 8123)


def test_a_report_without_figures_is_its_last_line() -> None:
    assert parse_report("Request concurrency: 1\n  Failed to retrieve results.\n\n") == "Failed to retrieve results."


def test_an_empty_report_has_no_figures() -> None:
    assert parse_report(" \n") == "perf_analyzer printed nothing"


def test_names_of_rows_are_unique() -> None:
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)


def test_our_onnx_model_is_compared_with_the_python_model_on_triton() -> None:
    pairs = {(row.protocol, row.concurrency, row.triton_model) for row in all_rows() if row.model == "add_sub_onnx"}
    assert pairs == {(protocol, count, "add_sub") for protocol in ("http", "grpc") for count in (1, 8)}
