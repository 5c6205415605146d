"""Whatever arrives in whatever order: nothing is lost, nothing is too large, nothing waits for ever.

Whether a batch waits for more: clients that wait for their responses lose no delay, others lose no batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.spec import DynamicBatching
from kernel.serving.request import Request
from kernel.testing import RecordingSink, model_spec
from schedulers.dynamic_batcher import ENOUGH, WAIT_AFTER, DynamicBatcher
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX = 8

arrivals = st.lists(st.tuples(st.integers(0, 50), st.integers(1, MAX), st.sampled_from([3, 5])), max_size=30)

sizes = st.lists(st.integers(1, MAX), max_size=3, unique=True)


def request(number: int, at_ns: int, rows: int, width: int) -> Request:
    made = Request("m", [Tensor("IN", "FP32", [rows, width], b"")], RecordingSink(), id=str(number))
    made.batch_size, made.queue_start_ns = rows, at_ns
    return made


@given(arrivals, sizes, st.sampled_from([0, 20]))
def test_every_request_runs_once_in_order_and_in_time(
    given_arrivals: list[tuple[int, int, int]], preferred: list[int], delay_ns: int
) -> None:
    settings = DynamicBatching(preferred_batch_sizes=tuple(sorted(preferred)) or (MAX,), max_queue_delay_ns=delay_ns)
    batcher = DynamicBatcher(model_spec("m", max_batch_size=MAX, dims=(-1,)), settings)
    ran: list[str] = []
    now_ns = 0

    def take() -> None:
        while batch := batcher.take(now_ns):
            assert sum(r.batch_size for r in batch) <= MAX
            assert len({r.inputs[0].shape[1] for r in batch}) == 1, "different shapes in one batch"
            ran.extend(r.id for r in batch)
        batcher.queue.check()

    for number, (gap_ns, rows, width) in enumerate(given_arrivals):
        deadline_ns = batcher.wait_until_ns()
        if deadline_ns is not None and deadline_ns <= now_ns + gap_ns:
            now_ns = max(now_ns, deadline_ns)
            take()
        now_ns = max(now_ns, sum(gap for gap, _, _ in given_arrivals[: number + 1]))
        assert batcher.add(request(number, now_ns, rows, width))
        take()
        oldest = next(iter(batcher.queue.in_order()), None)
        assert oldest is None or delay_ns, "without a delay nothing waits for an idle instance"
    while (deadline_ns := batcher.wait_until_ns()) is not None:
        now_ns = max(now_ns, deadline_ns)
        take()
    assert ran == [str(number) for number in range(len(given_arrivals))]


def test_a_request_that_was_lost_with_a_worker_is_executed_alone_and_at_once() -> None:
    spec = msgspec.structs.replace(model_spec("m", max_batch_size=MAX, dims=(-1,)), isolates_poison=True)
    batcher = DynamicBatcher(spec, DynamicBatching(preferred_batch_sizes=(MAX,), max_queue_delay_ns=1000))
    suspects = [request(number, 0, 1, 3) for number in range(2)]
    for each in suspects:
        each.suspected = 1
    batcher.add(request(2, 0, 1, 3))
    batcher.put_back(suspects)
    assert [[each.id for each in batcher.take(0)] for _ in range(3)] == [["0"], ["1"], []]
    assert [each.id for each in batcher.take(1000)] == ["2"]


DELAY_NS = 100

MAX_ROWS = 8


class Waits:
    """A model with one instance that is always free, and the batches that it gets."""

    def __init__(
        self, *, delay_may_end_early: bool = True, preferred: tuple[int, ...] = (), execution_ns: int = 0
    ) -> None:
        settings = DynamicBatching(
            preferred_batch_sizes=preferred, max_queue_delay_ns=DELAY_NS, delay_may_end_early=delay_may_end_early
        )
        spec = model_spec("m", max_batch_size=MAX_ROWS)
        self.batcher = DynamicBatcher(spec, settings, execution_ns=lambda: execution_ns)
        self.now_ns = 0
        #: Of each batch: its requests, and how long the oldest one has waited.
        self.batches: list[tuple[int, int]] = []

    def arrive(self, *after_ns: int) -> None:
        """Let requests arrive at these times after now, and then time pass until none is queued."""
        begun_ns = self.now_ns
        for after in after_ns:
            self._run_until(begun_ns + after)
            request = Request("m", [Tensor("IN", "FP32", [1, 1], b"")], RecordingSink())
            request.batch_size, request.queue_start_ns = 1, self.now_ns
            assert self.batcher.add(request)
            self._take()
        self._run_until(self.now_ns + 2 * DELAY_NS)
        assert not self.batcher.queue.count

    def _run_until(self, at_ns: int) -> None:
        deadline_ns = self.batcher.wait_until_ns()
        if deadline_ns is not None and deadline_ns <= at_ns:
            self.now_ns = max(self.now_ns, deadline_ns)
            self._take()
        self.now_ns = at_ns

    def _take(self) -> None:
        while requests := self.batcher.take(self.now_ns):
            self.batches.append((len(requests), self.now_ns - min(each.queue_start_ns for each in requests)))

    def last(self, count: int) -> list[tuple[int, int]]:
        return self.batches[-count:]


def taught(*after_ns: int) -> Waits:
    """Return waits of which the last ones have all been fruitless."""
    waits = Waits()
    for _ in range(ENOUGH):
        waits.arrive(*after_ns)
    assert waits.batches == [(len(after_ns), DELAY_NS)] * ENOUGH, "all of these have waited"
    return waits


@pytest.mark.parametrize("after_ns", [(0,), (0, 5, 10, 12), (0, 40)])
def test_after_fruitless_waits_a_batch_of_the_same_size_starts_at_once(after_ns: tuple[int, ...]) -> None:
    waits = taught(*after_ns)
    waits.arrive(*after_ns)
    assert waits.last(1) == [(len(after_ns), after_ns[-1])]
    assert waits.batcher.closed_by == "no more expected"


def test_now_and_then_a_batch_waits_and_if_nothing_comes_the_next_ones_start_at_once_again() -> None:
    waits = taught(0)
    for _ in range(2):
        for _ in range(WAIT_AFTER):
            waits.arrive(0)
        assert waits.last(WAIT_AFTER) == [(1, 0)] * WAIT_AFTER
        waits.arrive(0)
        assert waits.last(1) == [(1, DELAY_NS)]


def test_a_new_client_is_noticed_by_the_batch_that_waits_and_batches_grow() -> None:
    waits = taught(0, 5)
    for _ in range(WAIT_AFTER // 2):
        waits.arrive(0, 5, 10, 15)
    assert waits.last(2) == [(2, 5)] * 2, "no batch has waited yet"
    for _ in range(2 * ENOUGH):
        waits.arrive(0, 5, 10, 15)
    assert waits.last(2 * ENOUGH) == [(4, DELAY_NS)] * 2 * ENOUGH
    waits.arrive(0, 5, 10, 15)
    assert waits.last(1) == [(4, 15)]


def waits_until_at_once(waits: Waits) -> int:
    """Let single requests arrive until a batch starts at once; returns how many have waited."""
    waited = 0
    while waits.last(1)[0][1]:
        waits.arrive(0)
        waited += 1
    return waited


def test_each_time_more_come_than_expected_twice_as_many_waits_are_needed() -> None:
    waits = taught(0)
    waits.arrive(0)
    for doublings in (1, 2, 3, 3):
        for _ in range(WAIT_AFTER - 1):
            waits.arrive(0)
        assert waits.last(WAIT_AFTER) == [(1, 0)] * WAIT_AFTER
        waits.arrive(0, 70)
        assert waits.last(1) == [(2, DELAY_NS)]
        assert waits_until_at_once(waits) == (ENOUGH << doublings) + 1


def test_after_many_waits_that_were_as_fruitless_as_expected_the_usual_number_is_enough_again() -> None:
    waits = taught(0)
    for _ in range(WAIT_AFTER):
        waits.arrive(0)
    waits.arrive(0, 70)
    waits_until_at_once(waits)
    for _ in range(ENOUGH * (WAIT_AFTER + 1) + WAIT_AFTER - 1):
        waits.arrive(0)
    waits.arrive(0, 70)
    assert waits.last(1) == [(2, DELAY_NS)]
    assert waits_until_at_once(waits) == 2 * ENOUGH + 1, "not four times as many"


def test_the_longer_executions_take_the_more_waits_must_have_been_fruitless() -> None:
    waits = Waits(execution_ns=10 * DELAY_NS)
    for _ in range(10 * ENOUGH):
        waits.arrive(0)
    assert waits.batches == [(1, DELAY_NS)] * 10 * ENOUGH
    waits.arrive(0)
    assert waits.last(1) == [(1, 0)]


def test_a_smaller_batch_waits_for_the_usual_size() -> None:
    waits = taught(0, 5)
    waits.arrive(0, 90)
    assert waits.last(1) == [(2, 90)]
    waits.arrive(0)
    assert waits.last(1) == [(1, DELAY_NS)]
    waits.arrive(0, 5)
    assert waits.last(1) == [(2, DELAY_NS)], "what was learned no longer holds"


def test_a_wait_with_a_request_in_its_second_half_was_not_fruitless() -> None:
    waits = Waits()
    for _ in range(3 * ENOUGH):
        waits.arrive(0, 60)
    assert waits.batches == [(2, DELAY_NS)] * (3 * ENOUGH)


def test_a_batch_that_waited_for_an_instance_teaches_nothing() -> None:
    waits = Waits()
    for _ in range(3 * ENOUGH):
        request = Request("m", [Tensor("IN", "FP32", [1, 1], b"")], RecordingSink())
        request.batch_size, request.queue_start_ns = 1, waits.now_ns
        waits.batcher.add(request)
        waits.now_ns += 3 * DELAY_NS  # the instance is free only now
        assert waits.batcher.take(waits.now_ns) == [request]
    waits.arrive(0)
    assert waits.last(1) == [(1, DELAY_NS)]


@pytest.mark.parametrize("preferred", [(), (4,)])
def test_full_batches_show_that_waiting_pays(preferred: tuple[int, ...]) -> None:
    waits = Waits(preferred=preferred)
    for _ in range(ENOUGH - 1):
        waits.arrive(0)
    waits.arrive(*range(4 if preferred else MAX_ROWS))
    for _ in range(ENOUGH):
        waits.arrive(0)
        assert waits.last(1) == [(1, DELAY_NS)]
    waits.arrive(0)
    assert waits.last(1) == [(1, 0)]


def test_with_a_fixed_delay_every_batch_waits() -> None:
    waits = Waits(delay_may_end_early=False)
    for _ in range(3 * ENOUGH):
        waits.arrive(0)
    assert waits.batches == [(1, DELAY_NS)] * (3 * ENOUGH)


@given(st.lists(st.lists(st.integers(0, DELAY_NS), min_size=1, max_size=5), max_size=100), st.integers(1, 4))
def test_whatever_arrives_no_request_waits_longer_and_none_is_lost(
    arrivals: Sequence[Sequence[int]], repeats: int
) -> None:
    waits = Waits()
    for after_ns in arrivals:
        for _ in range(repeats * 6):
            waits.arrive(*sorted(after_ns))
    assert all(waited <= DELAY_NS for _, waited in waits.batches)
    assert sum(count for count, _ in waits.batches) == repeats * 6 * sum(map(len, arrivals))
