"""Work in the background: an exception that ends it is logged and counted, and some work begins again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.background import BackgroundTasks, FailureCount
from kernel.errors import InternalError
from tests.kernel.repository_lab import settled
from tests.own_records import own_records

if TYPE_CHECKING:
    from collections.abc import Callable


class Bug(Exception):
    """No code expects it."""


async def failing() -> None:
    raise Bug("in the background")


def test_a_task_that_ends_by_an_exception_is_logged_with_its_traceback_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = FailureCount()

    async def scenario() -> None:
        tasks = BackgroundTasks(failures)
        tasks.start(failing())
        await settled()
        assert (tasks.count, failures.value) == (0, 1)

    asyncio.run(scenario())
    assert "failing has failed in the background" in caplog.text
    assert "Bug: in the background" in caplog.text


def test_a_wait_ends_when_no_task_runs_any_more() -> None:
    order: list[str] = []

    async def scenario() -> None:
        tasks = BackgroundTasks(FailureCount())

        async def second() -> None:
            await settled()
            order.append("second")

        async def first() -> None:
            await settled()
            order.append("first")
            tasks.start(second())

        tasks.start(first())
        await tasks.wait()
        order.append("waited")

    asyncio.run(scenario())
    assert order == ["first", "second", "waited"]


def test_an_expected_error_goes_to_the_caller_that_waits_for_it_and_is_not_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = FailureCount()

    async def refused() -> None:
        raise InternalError("no luck")

    async def scenario() -> None:
        tasks = BackgroundTasks(failures)
        with pytest.raises(InternalError, match="no luck"):
            await tasks.uncancelled(refused())
        await settled()

    asyncio.run(scenario())
    assert failures.value == 0
    assert not own_records(caplog)


def test_kept_work_begins_again_after_each_exception_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureCount()
    runs: list[Callable[[], object]] = []

    async def work() -> None:
        runs.append(work)
        if len(runs) < 3:
            raise Bug("again")

    async def scenario() -> None:
        tasks = BackgroundTasks(failures)
        await tasks.keep("the test", work, 0)
        assert len(runs) == 3

    asyncio.run(scenario())
    assert failures.value == 2
    assert "the test has failed and begins again in 0 s" in caplog.text


def test_a_cancelled_task_is_no_failure() -> None:
    failures = FailureCount()

    async def scenario() -> None:
        tasks = BackgroundTasks(failures)
        tasks.start(asyncio.sleep(3600))
        tasks.keep("the test", failing, 3600)
        await settled()
        await tasks.close()

    asyncio.run(scenario())
    assert failures.value == 1  # that of the kept work
