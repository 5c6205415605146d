"""The table of the scoreboard leaves no row out, and says what failed."""

from __future__ import annotations

import os
import time

import msgspec
import pytest

from bench.machine import this_machine
from tests.faults.__main__ import SECRETS, measured_undisturbed
from tests.faults.disturbance import Disturbance, DisturbanceWatch, busy_time_s, watched
from tests.faults.page import BEGIN, END, measurement_of, merged, number_of, summary, table, with_table
from tests.faults.row import Finding, Result, Row, Settings, at_most, percentile
from tests.faults.rows.table import ROWS
from tests.faults.stored import PAGE, STORED

RESULT = Result("S1", "P1", "a kill", "0 lost", "0 lost | 20 kills", True, "", "2026-01-01", "abc", "2 cores", False)


def test_every_row_of_the_list_is_there_and_is_measured_or_says_why() -> None:
    ids = [row.id for row in ROWS]
    assert len(ids) == len(set(ids))
    assert set(ids) >= {f"S{number}" for number in range(1, 41)}
    assert all((row.measure is None) == bool(row.reason) for row in ROWS)


def test_rows_stand_in_the_order_of_their_numbers() -> None:
    ids = [row.id for row in ROWS]
    assert ids == sorted(ids, key=number_of)


def test_a_row_that_was_never_measured_is_in_the_table_and_says_so() -> None:
    rows = [Row(id="S1", promise="P1", fault="a kill", limit="0"), Row(id="S2", promise="P1", fault="b", limit="0")]
    found = merged([], [RESULT], rows)
    assert [each.row for each in found] == ["S1", "S2"]
    assert "| S2 | P1 | b | 0 |  | not measured: never yet |  |" in table(found)


def test_a_new_result_takes_the_place_of_the_stored_one() -> None:
    failed = msgspec.structs.replace(RESULT, passed=False, reason="1 lost")
    rows = [Row(id="S1", promise="P1", fault="a kill", limit="0")]
    assert merged([RESULT], [failed], rows) == [failed]
    assert "**failed**: 1 lost" in table([failed])


def test_cells_cannot_break_the_table() -> None:
    assert "0 lost \\| 20 kills" in table([RESULT])
    assert table([msgspec.structs.replace(RESULT, figure="a\nb")]).count("\n") == 2


def test_only_what_is_between_the_marks_is_written_anew() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    found = with_table(page, [RESULT])
    assert found.startswith("before\n")
    assert found.endswith("\nafter\n")
    assert "old" not in found
    assert with_table(found, [RESULT]) == found
    with pytest.raises(ValueError, match="the page has no"):
        with_table("nothing", [RESULT])


def test_the_page_shows_what_is_stored() -> None:
    stored = [msgspec.json.decode(line, type=Result) for line in STORED.read_bytes().splitlines()]
    page = PAGE.read_text()
    assert [each.row for each in stored] == [row.id for row in ROWS]
    assert with_table(page, stored) == page


def test_the_summary_counts_what_passed_failed_and_was_not_measured() -> None:
    others = [
        msgspec.structs.replace(RESULT, row="S2", passed=False),
        msgspec.structs.replace(RESULT, row="S3", passed=None, machine=""),
    ]
    assert summary([RESULT, *others]) == "1 rows passed, 1 failed, 1 were not measured. Machine: 2 cores."


def test_a_value_above_its_limit_is_said_with_both() -> None:
    assert at_most("p99", 12.345, 10, " ms") == ["p99 is 12.35 ms, the limit is 10 ms"]
    assert at_most("p99", 10, 10) == []


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(each) for each in range(100)], 0.99) == 99.0


@pytest.mark.parametrize(
    "text", ["/dev/shm/x", "/tmp/naiad-1/m", "memfd:y", "0x7f00112233", 'File "a.py"', "Traceback"]
)
def test_paths_addresses_and_traces_are_found_in_error_texts(text: str) -> None:
    assert SECRETS.search(f"500 {text}")


def test_usual_error_texts_have_none_of_these() -> None:
    assert not SECRETS.search("400 unexpected shape for input 'IN' for model 'm'. Expected [1], got [2]")


def test_a_row_says_how_much_the_machine_was_disturbed_and_how_often_it_was_measured() -> None:
    found = msgspec.structs.replace(RESULT, full=True, stall_ms=12.4, others=0.034, measurements=2)
    text = "2026-01-01, abc, all repetitions, woken 12 ms late, others 3%, measured 2 times"
    assert measurement_of(found) == text
    assert measurement_of(RESULT) == "2026-01-01, abc"
    assert measurement_of(msgspec.structs.replace(RESULT, date="")) == ""


QUIET, STALLED, SHARED = Disturbance(2.0, 0.01), Disturbance(40.0, 0.01), Disturbance(2.0, 0.4)


@pytest.mark.parametrize(
    ("disturbances", "fails", "measurements"),
    [
        ([STALLED], 0, 1),  # a row that passes is right, however the machine was
        ([QUIET], 1, 1),  # it was the server
        ([STALLED, QUIET], 1, 2),
        ([SHARED, QUIET], 1, 2),
        ([STALLED, SHARED, STALLED], 3, 3),
    ],
)
def test_a_row_that_fails_is_measured_again_only_if_the_machine_was_disturbed(
    disturbances: list[Disturbance], fails: int, measurements: int
) -> None:
    runs: list[int] = []

    class Watch(DisturbanceWatch):
        def __init__(self) -> None:
            self._asked = 0

        def seen(self) -> Disturbance:
            self._asked += 1
            return QUIET if self._asked % 2 else disturbances[len(runs) - 1]

    def measure(_settings: Settings) -> Finding:
        runs.append(1)
        return Finding("", ["too late"] if len(runs) <= fails else [])

    row = Row(id="S1", promise="P1", fault="a kill", limit="0", measure=measure)
    result = measured_undisturbed(row, this_machine(), Watch(), full=False)
    assert (result.passed, result.measurements, len(runs)) == (fails < len(runs), measurements, measurements)
    assert (result.stall_ms, result.others) == (disturbances[-1].stall_ms, disturbances[-1].others)


def test_the_time_of_the_machine_is_all_but_idle_and_waiting_for_disks() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_time_s(f"cpu  {ticks} 0 {2 * ticks} 700 900 0 0 {ticks} 5 5\ncpu0 1 2 3") == 4.0


def test_the_watch_measures_this_machine() -> None:
    """The processor time of this process and of its children is the row's own."""
    with watched() as watch:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        seen = watch.seen()
    assert seen.stall_ms >= 0
    assert 0 <= seen.others <= (os.cpu_count() or 1)
