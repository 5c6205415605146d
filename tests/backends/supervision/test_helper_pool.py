"""Helpers run tasks: results and errors come back, a lost helper fails its task and is replaced."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from backends.supervision.helper_pool import HelperPool
from backends.supervision.processes.spawning import SpawningLauncher
from kernel.errors import ArenaFull, InternalError, InvalidArgument, NoMemory, RequestCancelled, Unavailable
from shm.arena import Arena
from tests.backends.supervision.recorded_task import RecordedTask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

SIZE = 1 << 20


def run(scenario: Callable[[HelperPool], Awaitable[None]], *, count: int = 2, task_timeout_s: float = 60.0) -> None:
    async def main() -> None:
        launcher = SpawningLauncher(task_module="tests.backends.supervision.task_functions")
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
        busy = pool._free.pop()
        assert pool._for_regions() is pool._free[0]
        other = pool._free.pop()
        assert pool._for_regions() is busy, "all are busy: it waits for the first"
        pool._free += [other, busy]

    run(scenario)
