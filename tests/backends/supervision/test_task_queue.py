"""Which task a free helper runs next."""

from __future__ import annotations

from backends.supervision.task_queue import LARGE_BYTE_SIZE, TaskQueue
from tests.backends.supervision.recorded_task import RecordedTask


def task(byte_size: int) -> RecordedTask:
    return RecordedTask("t", bytes(byte_size))


def test_tasks_are_taken_in_the_order_in_which_they_came() -> None:
    queue = TaskQueue(3)
    tasks = [task(10), task(LARGE_BYTE_SIZE + 1), task(20), task(LARGE_BYTE_SIZE + 2)]
    for each in tasks:
        queue.add(each)
    assert len(queue) == 4
    assert [queue.take() for _ in range(5)] == [*tasks, None]


def test_one_helper_is_kept_free_of_large_tasks() -> None:
    queue = TaskQueue(2)
    first, second, small = task(LARGE_BYTE_SIZE + 1), task(LARGE_BYTE_SIZE + 1), task(LARGE_BYTE_SIZE)
    for each in (first, second, small):
        queue.add(each)
    assert queue.take() is first
    assert queue.take() is small, "the second large one waits, a small one does not wait for it"
    assert queue.take() is None
    queue.ended(small)
    assert queue.take() is None, "a small one leaves no room for a large one"
    queue.ended(first)
    assert queue.take() is second


def test_a_single_helper_runs_large_tasks_too() -> None:
    queue = TaskQueue(1)
    large = task(LARGE_BYTE_SIZE + 1)
    queue.add(large)
    assert queue.take() is large


def test_a_task_that_is_removed_is_not_taken() -> None:
    queue = TaskQueue(2)
    small, large = task(1), task(LARGE_BYTE_SIZE + 1)
    queue.add(small)
    queue.add(large)
    assert queue.remove(small)
    assert queue.remove(large)
    assert not queue.remove(small), "it does not wait any more"
    assert queue.take() is None
