"""What the table, the notes, the CSV and the comparison say about measured loads."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kernel.tools.bench.messages import (
    Latencies,
    LatencyHistogram,
    MessageFrames,
    PointProgress,
    PointResult,
    framed,
    from_process,
)
from kernel.tools.bench.report import compared_text, csv_text, duration, row_notes, run_text, short_note
from kernel.tools.bench.results import (
    BenchRun,
    ClientFigures,
    LatencyFigures,
    PointRow,
    ServerTimes,
    point_row,
    server_times,
)


def row(**changes: Any) -> PointRow:
    usual = PointRow(
        connections=4, target_rate=0.0, seconds=5.0, completed=5000, failed=0, rate=1000.0,
        latency=LatencyFigures(4000.0, 9000.0, {"50": 3900.0, "99": 8000.0}), client=ClientFigures(20.0, 0.1),
        server=ServerTimes(100.0, 10.0, 2000.0, 5.0, 2.0, 5000),
    )  # fmt: skip
    return msgspec.structs.replace(usual, **changes)


def run(*rows: PointRow, label: str = "here:8000", **changes: Any) -> BenchRun:
    usual = BenchRun(label, "triton 2.51", "http", "resnet", 1, "", list(rows))
    return msgspec.structs.replace(usual, **changes)


def result(latencies: list[int], **changes: Any) -> PointResult:
    histogram = LatencyHistogram()
    for each in latencies:
        histogram.record(each)
    none = Latencies({}, 0, 0)
    usual = PointResult(
        Latencies(histogram.as_map(), histogram.total, histogram.largest), none, none, none, len(latencies),
        len(latencies), [], {}, 0, 0, 1_000_000_000, 100_000_000,
    )  # fmt: skip
    return msgspec.structs.replace(usual, **changes)


def test_the_results_of_processes_become_one_row() -> None:
    found = point_row(
        [result([1000] * 10, errors={"a": 1}), result([3000] * 10, errors={"a": 2, "b": 1}, cpu_ns=500_000_000)],
        [50, 99], connections=20,
    )  # fmt: skip
    assert (found.completed, found.failed, found.rate) == (20, 4, 20.0)
    assert found.errors == {"a": 3, "b": 1}
    assert found.latency.percentiles == {"50": pytest.approx(1, rel=0.01), "99": pytest.approx(3, rel=0.01)}
    assert found.client.busy == 0.5
    assert found.client.cpu_us == pytest.approx(30_000)


def test_seconds_that_differ_are_noticed() -> None:
    steady = point_row([result([1] * 9, by_second=[3, 3, 3], measured_ns=3_000_000_000)], [50], connections=1)
    uneven = point_row([result([1] * 9, by_second=[8, 1], measured_ns=3_000_000_000)], [50], connections=1)
    assert (steady.variation, uneven.variation > 1) == (0.0, True)
    assert "measure again" in row_notes(msgspec.structs.replace(uneven, completed=900))[0]


def test_a_load_that_needs_no_explanation_has_no_note() -> None:
    assert row_notes(row()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"client": ClientFigures(50.0, 0.95)}, "the client is the limit: a load process was busy for 95 %"),
        ({"failed": 3, "errors": {"500: boom": 3}}, "3 requests failed: 3 times '500: boom'"),
        ({"target_rate": 2000.0, "unsent": 7}, "7 requests were due and never sent"),
        ({"target_rate": 2000.0}, "only 1,000 of 2,000 requests/s"),
        ({"target_rate": 1000.0, "client": ClientFigures(20.0, 0.1, 900.0)}, "the client was late"),
        ({"completed": 12}, "only 12 requests were completed"),
        ({"completed": 0, "rate": 0.0}, "take a longer --duration"),
    ],
)
def test_what_a_reader_must_know_is_said(changes: dict[str, Any], words: str) -> None:
    assert words in "\n".join(row_notes(row(**changes)))


def test_latencies_below_a_millisecond_come_with_the_clients_own_time() -> None:
    assert short_note([row()]) == ""
    short = row(latency=LatencyFigures(300.0, 400.0, {"50": 300.0}))
    assert "20 us of processor time for a request" in short_note([short])


def test_the_table_has_a_line_for_each_load_and_the_servers_times() -> None:
    lines = run_text(run(row(), row(connections=8, server=None), notes=["a note"])).splitlines()
    assert lines[0] == "resnet at here:8000 (triton 2.51, http)"
    assert lines[1].split() == [
        "in", "flight", "requests/s", "errors", "mean", "p50", "p99", "queue", "input", "compute", "output", "batch",
        "client",
    ]  # fmt: skip
    assert "2.00 ms" in lines[2]
    assert lines[3].split()[0] == "8"
    assert lines[4] == "a note"


def test_an_empty_run_says_so() -> None:
    assert "nothing was measured" in run_text(run())


def test_times_have_three_digits() -> None:
    assert [duration(each) for each in (7.4, 999.4, 1000, 12_345, 123_456, 2_340_000)] == [
        "7 us", "999 us", "1.00 ms", "12.3 ms", "123 ms", "2.34 s",
    ]  # fmt: skip


def test_two_runs_stand_side_by_side_with_their_ratio() -> None:
    faster = row(rate=2000.0, latency=LatencyFigures(2000.0, 9000.0, {"50": 1950.0, "99": 8000.0}))
    text = compared_text(run(row(), row(connections=64)), run(faster, label="there:8000"))
    [ratios] = [line.split() for line in text.splitlines() if line.startswith("B/A")]
    assert ratios == ["B/A", "2.00", "0.50", "0.50", "1.00", "1.00"]
    assert "no load in common" in compared_text(run(row()), run(row(connections=5)))


def test_csv_has_perf_analyzers_names_and_microseconds() -> None:
    head, line = csv_text([run(row(), batch=2)]).splitlines()
    found = dict(zip(head.split(","), line.split(","), strict=True))
    assert (found["Concurrency"], found["Inferences/Second"], found["p99 latency"]) == ("4", "2000.00", "8000")
    assert found["Server Compute Infer"] == "2000"


def test_server_times_are_the_difference_of_two_statistics() -> None:
    def statistics(count: int) -> list[dict[str, Any]]:
        times = {part: {"count": count, "ns": count * 5000} for part in ("queue", "compute_infer")}
        return [{"inference_count": count * 2, "execution_count": count, "inference_stats": times}]

    found = server_times(statistics(10), statistics(30))
    assert found == ServerTimes(5.0, 0.0, 5.0, 0.0, 2.0, 20)
    assert server_times(statistics(10), statistics(10)) is None
    assert server_times(None, statistics(10)) is None


def test_messages_are_put_together_from_any_pieces() -> None:
    data = framed(PointProgress(1, 2)) + framed(PointProgress(3, 4))
    frames = MessageFrames()
    found = [message for octet in data for message in frames.feed(bytes([octet]))]
    assert [from_process.decode(each) for each in found] == [PointProgress(1, 2), PointProgress(3, 4)]
