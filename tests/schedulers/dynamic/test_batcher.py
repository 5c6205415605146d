"""Whatever arrives in whatever order: nothing is lost, nothing is too large, nothing waits for ever."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.spec import DynamicBatching
from kernel.serving.request import Request
from kernel.testing import RecordingSink, model_spec
from schedulers.dynamic.batcher import DynamicBatcher
from shm.tensor import Tensor

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
