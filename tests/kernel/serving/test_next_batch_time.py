"""The next batch of a busy instance is dispatched shortly before the end of the last one."""

from __future__ import annotations

import pytest

from kernel.observe.execution_reports import ExecutionTimes
from kernel.serving.next_batch_time import NextBatchTime

US = 1_000
MS = 1_000_000


def learned(took_ns: int = 2 * MS, rows: int = 4, count: int = 64) -> NextBatchTime:
    """Return what has seen some executions that took the same time, with nothing behind them."""
    found = NextBatchTime()
    for _ in range(count):
        found.executed(rows, times(0, took_ns), followed=False, queued=False)
    return found


def times(start_ns: int, took_ns: int, input_ns: int = 0, output_ns: int = 0) -> ExecutionTimes:
    return ExecutionTimes(
        start_ns, start_ns + input_ns, start_ns + input_ns + took_ns, start_ns + input_ns + took_ns + output_ns
    )


def lead_ns(found: NextBatchTime, took_ns: int = 2 * MS) -> int:
    """Return how long before the expected end the next batch is dispatched."""
    at_ns = found.dispatch_ns(0, 4)
    assert at_ns is not None
    return took_ns - at_ns


def test_it_is_dispatched_some_hundred_microseconds_before_the_expected_end() -> None:
    found = learned()
    at_ns = found.dispatch_ns(10 * MS, 4)
    assert at_ns is not None
    assert 11 * MS < at_ns < 12 * MS - 100 * US


def test_nothing_is_said_of_as_many_rows_as_were_never_executed() -> None:
    assert NextBatchTime().dispatch_ns(0, 4) is None
    found = learned(rows=4)
    assert found.dispatch_ns(0, 4) is not None
    assert found.dispatch_ns(0, 3) is None
    assert found.dispatch_ns(0, 16) is None


def test_each_number_of_rows_has_its_own_time() -> None:
    found = learned(MS, rows=1)
    for _ in range(64):
        found.executed(16, times(0, 3 * MS), followed=False, queued=False)
    one, sixteen = found.dispatch_ns(0, 1), found.dispatch_ns(0, 16)
    assert one is not None
    assert sixteen is not None
    assert sixteen - one == 2 * MS


def test_large_numbers_of_rows_share_a_time_with_similar_ones() -> None:
    found = learned(rows=1000)
    assert found.dispatch_ns(0, 1010) == found.dispatch_ns(0, 1000)
    for rows in range(1, 100_000):
        found.executed(rows, times(0, 2 * MS), followed=False, queued=False)
    assert len(found._by_rows) < 150, "what is kept has a bound"


def test_of_a_model_whose_executions_take_very_different_times_nothing_is_said() -> None:
    found = learned()
    for _ in range(32):
        found.executed(4, times(0, 10 * US), followed=False, queued=False)
        found.executed(4, times(0, 8 * MS), followed=False, queued=False)
    assert found.dispatch_ns(0, 4) is None


def test_it_is_never_dispatched_before_half_of_the_execution_has_passed() -> None:
    found = learned(120 * US)
    assert found.dispatch_ns(MS, 4) == MS + 60 * US


def test_the_lead_grows_while_the_instance_waits_for_its_batches_up_to_a_limit() -> None:
    found = learned(20 * MS)
    before = lead_ns(found, 20 * MS)
    found.executed(4, times(0, 20 * MS), followed=False, queued=True)
    assert lead_ns(found, 20 * MS) > before, "requests waited, and the instance had no batch"
    for number in range(1000):
        found.executed(4, times(number * 21 * MS, 20 * MS), followed=True, queued=False)
    assert lead_ns(found, 20 * MS) == 2 * MS


def test_the_lead_shrinks_while_the_instance_never_waits_down_to_a_limit() -> None:
    found = learned()
    for number in range(1000):
        found.executed(4, times(number * 2 * MS, 2 * MS), followed=True, queued=False)
    assert lead_ns(found) == 100 * US


def test_the_work_of_the_worker_between_two_batches_is_no_wait() -> None:
    found = learned()
    for number in range(1000):
        start_ns = number * (2 * MS + 600 * US)
        found.executed(4, times(start_ns, 2 * MS, input_ns=300 * US, output_ns=300 * US), followed=True, queued=False)
    assert lead_ns(found) == 100 * US


def test_a_worker_that_computes_while_it_responds_has_waited_from_the_end_of_the_computation() -> None:
    found = learned()
    for number in range(1000):  # gathered before the computation begins, scattered after the next one has begun
        start_ns = number * 2200 * US
        found.executed(4, times(start_ns, 2 * MS, output_ns=300 * US), followed=True, queued=False)
    assert lead_ns(found) == MS, "200 µs between two computations, and never more than half of one"


def test_a_batch_that_was_gathered_in_time_has_not_kept_the_instance_waiting() -> None:
    found = learned()
    for number in range(1000):
        start_ns = number * 2150 * US - 120 * US
        gathered = times(start_ns, 2 * MS, input_ns=120 * US, output_ns=300 * US)
        found.executed(4, gathered, followed=True, queued=False)
    assert lead_ns(found) == 100 * US, "the processor was busy for 150 µs between two computations"


def test_after_a_pause_without_requests_nothing_is_learned_of_the_lead() -> None:
    found = learned()
    before = lead_ns(found)
    for number in range(100):
        found.executed(4, times(number * 50 * MS, 2 * MS), followed=False, queued=False)
    assert lead_ns(found) == before


@pytest.mark.parametrize(("copied_ns", "grows"), [(0, False), (500 * US, True)])
def test_a_gpu_that_waits_for_the_copies_of_the_next_batch_gets_that_one_earlier(
    copied_ns: int, *, grows: bool
) -> None:
    found = NextBatchTime()
    leads = []
    for number in range(20):
        start_ns = number * 3 * MS
        # Computed from `copied_ns` after the end of the computation before, which was 1 ms before the end of its batch.
        begun_ns = start_ns + copied_ns
        each = ExecutionTimes(begun_ns - MS, begun_ns, start_ns + 3 * MS, start_ns + 4 * MS)
        found.executed(4, each, followed=True, queued=False, overlaps=True)
        leads.append(found._lead_ns)
    assert (leads[-1] > leads[0]) == grows
