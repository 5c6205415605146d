"""A process may take as long as it takes to start, while it works.

What a process wants of the processors is its time and its wait for them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from backends.launch import working
from backends.launch.working import WorkWatch, demanded_ns, done_while_working, work_mark
from backends.supervision import session as session_module
from backends.supervision.session import WorkerSession
from backends.transport import wire
from kernel.errors import InternalError
from tests.backends.supervision.played_worker import FakeWorker

if TYPE_CHECKING:
    from collections.abc import Hashable


def test_a_process_stands_still_when_its_mark_has_not_changed_for_the_limit() -> None:
    watch = WorkWatch(limit_ns=30, now_ns=100)
    assert not watch.stands_still(110, (1, "1"))
    assert not watch.stands_still(139, (1, "1"))
    assert watch.stands_still(140, (1, "1"))
    assert not watch.stands_still(145, (1, "2"))
    assert not watch.stands_still(174, (1, "2"))
    assert watch.stands_still(175, (1, "2"))


def test_of_a_process_of_which_nothing_is_known_the_whole_time_counts() -> None:
    watch = WorkWatch(limit_ns=30, now_ns=100)
    assert not watch.stands_still(129, None)
    assert watch.stands_still(130, None)


def test_a_process_that_ends_while_it_is_watched_has_the_limit_once_more() -> None:
    watch = WorkWatch(limit_ns=30, now_ns=100)
    assert not watch.stands_still(120, 1)
    assert not watch.stands_still(125, None)
    assert watch.stands_still(155, None)


def test_what_is_done_is_found_without_a_look_at_the_process() -> None:
    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        future.set_result(1)
        assert await done_while_working(future, lambda: pytest.fail("a look"), 0)

    asyncio.run(main())


def test_a_future_that_is_set_in_time_is_waited_for_as_long_as_the_mark_changes() -> None:
    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        looks = itertools.count()

        def mark() -> Hashable:
            number = next(looks)
            if number == 20:
                future.set_result(None)
            return number

        assert await done_while_working(future, mark, 0.001)
        assert next(looks) == 21

    asyncio.run(main())


def test_a_process_that_a_signal_has_stopped_at_two_looks_in_a_row_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(working, "LOOK_S", 0.001)
    looks = iter([True, False, True, True])

    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        assert not await done_while_working(future, lambda: None, 600, lambda: next(looks))

    asyncio.run(main())
    assert list(looks) == []


def test_a_worker_that_works_may_start_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HELLO_TIMEOUT_S", 0.001)

    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        looks = itertools.count()

        def mark() -> Hashable:
            number = next(looks)
            if number == 20:
                worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
            return number

        worker.mark = mark
        await session.start(worker)
        assert next(looks) > 20
        worker.kill()

    asyncio.run(main())


def test_a_worker_that_does_nothing_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HELLO_TIMEOUT_S", 0.001)

    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        ends: list[str] = []
        session.on_lost = ends.append
        with pytest.raises(InternalError, match="^the worker did not start: its process did nothing for 0"):
            await session.start(worker)
        assert ends == ["killed by signal 9 (SIGKILL)"]

    asyncio.run(main())


#: Waits until it is asked to work, then uses a processor until it has used one for as long as the argument says.
PROGRAM = """
import sys, time
print(flush=True)
sys.stdin.readline()
while time.process_time_ns() < int(sys.argv[1]):
    pass
print(flush=True)
sys.stdin.readline()
"""


def test_a_process_that_works_demands_time_and_one_that_waits_does_not() -> None:
    command = [sys.executable, "-c", PROGRAM, "1_000_000_000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before, mark = demanded_ns(process.pid), work_mark(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = demanded_ns(process.pid)
        assert work_mark(process.pid) != mark
        process.stdin.close()
    assert before is not None
    assert after is not None
    assert after - before >= 500_000_000


def test_a_process_that_has_ended_demands_nothing_that_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert demanded_ns(process.pid) is None
    assert work_mark(process.pid) is None


def test_the_time_of_this_process_counts() -> None:
    found = demanded_ns(os.getpid())
    assert found is not None
    assert found >= time.process_time_ns() // 2


def test_a_process_that_waits_leaves_the_same_mark() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()  # it has started, and reads again
        while (mark := work_mark(process.pid)) != work_mark(process.pid):
            pass
        assert mark is not None
        process.stdin.close()
