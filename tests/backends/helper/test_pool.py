"""Helpers run tasks: which one is next, results and errors come back, a lost helper fails its task and is replaced."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from backends.helper.pool import LARGE_BYTE_SIZE, HelperPool, TaskQueue
from backends.launch.spawning import SpawningLauncher
from kernel.errors import ArenaFull, InternalError, InvalidArgument, NoMemory, RequestCancelled, Unavailable
from shm.arena import Arena
from tests.backends.helper.recorded_task import RecordedTask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

SIZE = 1 << 20


def run(scenario: Callable[[HelperPool], Awaitable[None]], *, count: int = 2, task_timeout_s: float = 60.0) -> None:
    async def main() -> None:
        launcher = SpawningLauncher(task_module="tests.backends.helper.task_functions")
        pool = HelperPool(launcher, 1 << 22, count=count, task_timeout_s=task_timeout_s)
        async with asyncio.timeout(50):
            try:
                await scenario(pool)
            finally:
                await pool.close()

    asyncio.run(main())


async def ended(pool: HelperPool, task: RecordedTask) -> RecordedTask:
    pool.add(task)
    await task.ended.wait()
    return task


def test_a_task_writes_its_result_into_memory_that_it_asks_for() -> None:
    async def scenario(pool: HelperPool) -> None:
        with Arena("results", SIZE) as arena:
            text = os.urandom(300_000)
            task = await ended(pool, RecordedTask("reverse", text, arena))
            assert (task.messages, task.result, task.output) == ([b"300000"], b"arguments", None)
            assert task.block is not None
            assert bytes(task.block.view()) == text[::-1]
            task.block.release()

    run(scenario)


def test_sources_and_result_may_lie_in_the_same_arena() -> None:
    async def scenario(pool: HelperPool) -> None:
        with Arena("both", SIZE) as arena:
            source = arena.take(50_000)
            assert source is not None
            source.view()[:] = bytes(range(250)) * 200
            task = RecordedTask("reverse", b"", arena)
            task.sources[0].data, task.sources[0].span = None, source.span
            await ended(pool, task)
            assert task.block is not None
            assert bytes(task.block.view()) == (bytes(range(250)) * 200)[::-1]
            task.block.release()
            source.release()

    run(scenario)


def test_an_output_is_in_memory_of_the_helper_and_can_be_the_source_of_another_task() -> None:
    async def scenario(pool: HelperPool) -> None:
        small = await ended(pool, RecordedTask("double", b"ab"))
        assert small.output is not None
        assert (small.result, small.output.data) == (b"twice", b"abab")
        large = await ended(pool, RecordedTask("double", bytes(5000)))
        assert large.output is not None
        assert large.output.data is None
        again = RecordedTask("double", b"")
        again.sources = [large.output]
        await ended(pool, again)
        assert again.output is not None
        assert bytes(again.output.raw()) == bytes(20_000)
        for task in (large, again):
            assert task.output is not None
            task.output.release()

    run(scenario)


def test_errors_come_back_as_they_were_and_the_helper_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(pool: HelperPool) -> None:
        refused = await ended(pool, RecordedTask("refuse", b""))
        assert isinstance(refused.error, InvalidArgument)
        assert (refused.error.message, refused.error.before_queueing) == ("wrong", True)
        failed = await ended(pool, RecordedTask("fail", b""))
        assert isinstance(failed.error, InternalError)
        assert failed.error.message == "ValueError: a bug"
        too_large = await ended(pool, RecordedTask("take_too_much", b""))
        assert isinstance(too_large.error, NoMemory)
        assert too_large.error.message == "the message needs too much memory to be decoded or encoded"
        full = ArenaFull(5)
        assert (await ended(pool, RecordedTask("reverse", b"12345", None, full))).error is full
        assert (await ended(pool, RecordedTask("double", b"x"))).result == b"twice"
        assert "was lost" not in caplog.text

    run(scenario, count=1)


def test_a_helper_that_dies_fails_its_task_and_another_one_takes_its_place() -> None:
    async def scenario(pool: HelperPool) -> None:
        lost = await ended(pool, RecordedTask("die", b""))
        assert isinstance(lost.error, Unavailable)
        assert lost.error.message == "the helper process was lost (killed by signal 9 (SIGKILL))"
        assert (await ended(pool, RecordedTask("double", b"x"))).result == b"twice"

    run(scenario, count=1)


def test_a_task_that_takes_too_long_is_ended_with_its_helper() -> None:
    async def scenario(pool: HelperPool) -> None:
        slow = RecordedTask("never_end", b"")
        after = RecordedTask("double", b"x")
        pool.add(slow)
        pool.add(after)
        await slow.ended.wait()
        assert isinstance(slow.error, Unavailable)
        assert slow.error.message == "a message was not decoded or encoded within 1 s"
        await after.ended.wait()
        assert after.result == b"twice", "the next task runs on a new helper"

    run(scenario, count=1, task_timeout_s=1.0)


def test_a_task_that_waits_can_be_cancelled_and_one_that_runs_ends_as_usual() -> None:
    async def scenario(pool: HelperPool) -> None:
        with Arena("results", SIZE) as arena:
            running, waiting = RecordedTask("reverse", b"ab", arena), RecordedTask("double", b"")
            pool.add(running)
            pool.add(waiting)
            pool.cancel(running)
            pool.cancel(waiting)
            assert isinstance(waiting.error, RequestCancelled)
            await running.ended.wait()
            assert running.result == b"arguments"

    run(scenario, count=1)


def test_tasks_fail_if_the_pool_is_closed() -> None:
    running, waiting = RecordedTask("never_end", b""), RecordedTask("double", b"")

    async def scenario(pool: HelperPool) -> None:
        pool.add(running)
        pool.add(waiting)

    run(scenario, count=1)
    assert isinstance(running.error, Unavailable)
    assert isinstance(waiting.error, RequestCancelled)


def test_regions_are_read_by_a_helper_that_runs_no_task() -> None:
    async def scenario(pool: HelperPool) -> None:
        busy = pool.free.pop()
        assert pool.for_regions() is pool.free[0]
        other = pool.free.pop()
        assert pool.for_regions() is busy, "all are busy: it waits for the first"
        pool.free += [other, busy]

    run(scenario)


def task(byte_size: int, peer: str = "") -> RecordedTask:
    made = RecordedTask("t", bytes(byte_size))
    made.peer = peer
    return made


def taken(queue: TaskQueue) -> list[RecordedTask]:
    """Take all tasks, one after the other as each has ended."""
    found = []
    while (each := queue.take()) is not None:
        assert isinstance(each, RecordedTask)
        found.append(each)
        queue.ended(each)
    return found


def test_tasks_are_taken_in_the_order_in_which_they_came() -> None:
    queue = TaskQueue(3)
    tasks = [task(10), task(LARGE_BYTE_SIZE + 1), task(20), task(LARGE_BYTE_SIZE + 2)]
    for each in tasks:
        queue.add(each)
    assert len(queue) == 4
    assert [queue.take() for _ in range(5)] == [*tasks, None]


LARGE = LARGE_BYTE_SIZE + 1


def test_the_first_task_of_a_peer_waits_for_none_that_another_has_waiting() -> None:
    queue = TaskQueue(2)
    first = [task(LARGE, "first") for _ in range(20)]
    for each in first:
        queue.add(each)
    running = queue.take()
    assert running is first[0]
    second = [task(LARGE, "second"), task(LARGE, "second")]
    for each in second:
        queue.add(each)
    queue.ended(running)
    assert taken(queue)[:4] == [second[0], first[1], second[1], first[2]]


def test_peers_get_equal_parts_of_the_bytes() -> None:
    queue = TaskQueue(2)
    small = [task(LARGE, "small") for _ in range(12)]
    large = [task(4 * LARGE, "large") for _ in range(3)]
    for each in (*large, *small):
        queue.add(each)
    order = taken(queue)
    assert [order.index(each) for each in large] == sorted(order.index(each) for each in large)
    between = order.index(large[2]) - order.index(large[1]) - 1
    assert 3 <= between <= 5, "tasks of the other peer with about as many bytes"


def test_a_peer_that_was_idle_has_saved_nothing_up() -> None:
    queue = TaskQueue(2)
    for _ in range(10):
        queue.add(task(LARGE, "busy"))
    assert len(taken(queue)) == 10
    busy, idle = ([task(LARGE, name) for _ in range(3)] for name in ("busy", "idle"))
    for each in (*idle, *busy):
        queue.add(each)
    assert {each.peer for each in taken(queue)[:3]} == {"busy", "idle"}


def test_peers_get_equal_parts_of_small_and_large_tasks_together() -> None:
    queue = TaskQueue(1)
    larges = [task(LARGE, "first") for _ in range(3)]
    for each in larges:
        queue.add(each)
    running = queue.take()
    assert running is larges[0]
    small = task(10, "second")
    queue.add(small)
    queue.ended(running)
    assert taken(queue) == [small, *larges[1:]]


def test_peers_that_have_gone_are_forgotten() -> None:
    queue = TaskQueue(2)
    for number in range(5_000):
        queue.add(task(1, f"peer {number}"))
        assert len(taken(queue)) == 1
    assert len(queue._ends) < 1_000
    assert not queue._waiting


def test_new_peers_without_end_do_not_keep_others_waiting() -> None:
    queue = TaskQueue(2)
    old = [task(LARGE, "old") for _ in range(3)]
    for each in old:
        queue.add(each)
    order = []
    for number in range(40):
        queue.add(task(LARGE, f"new {number}"))
        found = queue.take()
        assert found is not None
        order.append(found)
        queue.ended(found)
    assert all(each in order for each in old)


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


class CountedTask(RecordedTask):
    """Counts how often a queue looks at it."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "sources":
            CountedTask.looks += 1
        return super().__getattribute__(name)


def test_a_client_that_leaves_has_no_task_searched() -> None:
    queue = TaskQueue(2)
    tasks = [CountedTask("t", b"") for _ in range(20_000)]
    for each in tasks:
        queue.add(each)
    other = task(1, "other")
    queue.add(other)
    CountedTask.looks = 0
    assert all(queue.remove(each) for each in reversed(tasks))
    assert CountedTask.looks <= 2 * len(tasks)
    assert len(queue) == 1
    assert len(queue._small) + len(queue._large) < 1_000, "entries of removed tasks do not stay"
    assert taken(queue) == [other]


def test_tasks_of_a_peer_that_were_removed_are_passed_over() -> None:
    queue = TaskQueue(2)
    tasks = [task(LARGE if number % 2 else 1) for number in range(10)]
    for each in tasks:
        queue.add(each)
    for each in tasks[:5]:
        assert queue.remove(each)
    assert taken(queue) == tasks[5:]
    assert not queue.remove(tasks[7]), "it was taken"
