"""What models have started ends with their workers and with the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from backends.launch.session_watcher import Watch, end_sessions, members_of, stat_of
from backends.launch.watcher_process import SessionWatcher
from tests.open_descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

#: Starts a process with a process group of its own, writes its id, and waits.
STARTS_ANOTHER = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], process_group=0)
print(child.pid, flush=True)
signal.pause()
"""

#: A kernel: watches the session whose number is its argument, writes a line, and waits to be killed.
KERNEL = """
import asyncio, sys
from backends.launch.watcher_process import SessionWatcher

async def main():
    watcher = SessionWatcher()
    watcher.add(int(sys.argv[1]))
    print(watcher.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


class FakeWorkerProcess:
    """The leader of a session in which there is another process, with a process group of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", STARTS_ANOTHER], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())
        self.child_fd = os.pidfd_open(self.child)
        self.session = self.process.pid

    def end(self) -> None:
        """End the leader, as a worker ends that its kernel has killed."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.end()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.child_fd, signal.SIGKILL)
        os.close(self.child_fd)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def worker() -> Iterator[FakeWorkerProcess]:
    made = FakeWorkerProcess()
    yield made
    made.close()


async def ended(pidfd: int) -> None:
    """Wait for the end of a process."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(pidfd, event.set)
    await event.wait()
    loop.remove_reader(pidfd)


def lives(pid: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and not stat.ended


def run(scenario: Callable[[SessionWatcher], Awaitable[None]]) -> None:
    async def main() -> None:
        watcher = SessionWatcher()
        await scenario(watcher)
        await watcher.close()
        assert not watcher.pid

    asyncio.run(main())


def test_the_rest_of_a_session_ends_after_its_worker(worker: FakeWorkerProcess) -> None:
    async def scenario(watcher: SessionWatcher) -> None:
        watcher.add(worker.session)
        worker.end()
        assert lives(worker.child)
        watcher.remove(worker.session)
        await ended(worker.child_fd)

    run(scenario)


def test_all_sessions_end_when_the_kernel_is_killed(worker: FakeWorkerProcess) -> None:
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL, str(worker.session)], stdout=subprocess.PIPE)
    assert kernel.stdout is not None
    watcher_fd = os.pidfd_open(int(kernel.stdout.readline()))
    kernel.kill()
    kernel.communicate()
    asyncio.run(ended(worker.child_fd))
    asyncio.run(ended(watcher_fd))
    os.close(watcher_fd)
    assert worker.process.wait() == -signal.SIGKILL


def test_a_watcher_that_is_killed_is_replaced_by_one_that_knows_all_sessions(
    worker: FakeWorkerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(watcher: SessionWatcher) -> None:
        watcher.add(worker.session)
        first = watcher.pid
        os.kill(first, signal.SIGKILL)
        watcher.ended.clear()
        await watcher.ended.wait()
        assert not watcher.pid
        assert watcher.restart is not None
        while not watcher.pid:  # noqa: ASYNC110 - the loop starts it
            await asyncio.sleep(0.001)
        assert watcher.pid != first
        worker.end()
        watcher.remove(worker.session)
        await ended(worker.child_fd)

    run(scenario)
    assert "has ended with code -9" in caplog.text


def test_a_watcher_that_reads_nothing_is_replaced(worker: FakeWorkerProcess) -> None:
    async def scenario(watcher: SessionWatcher) -> None:
        watcher.add(worker.session)
        first = watcher.pid
        os.kill(first, signal.SIGSTOP)
        while watcher.pid == first:
            watcher.remove(1 << 30)  # there is no such process
            await asyncio.sleep(0)
        while not watcher.pid:  # noqa: ASYNC110 - the loop starts it
            await asyncio.sleep(0.001)
        worker.end()
        watcher.remove(worker.session)
        await ended(worker.child_fd)

    run(scenario)


def test_a_watcher_that_cannot_be_started_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(watcher: SessionWatcher) -> None:
        monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
        watcher.add(1 << 30)
        watcher.remove(1 << 30)
        assert not watcher.pid

    run(scenario)
    assert "cannot be started" in caplog.text


def test_a_start_without_enough_descriptors_leaves_nothing_behind(worker: FakeWorkerProcess) -> None:
    """As many as a watcher needs, one after the other, are there before the next one lacks."""

    async def start_with(free_count: int) -> bool:
        watcher = SessionWatcher()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = open_descriptors()
        free = [fd for fd in range(len(before) + free_count + 1) if fd not in before]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[free_count], hard))
        try:
            watcher.add(worker.session)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        started = bool(watcher.pid)
        if not started:
            assert open_descriptors() <= before
            assert watcher.restart is not None, "another one is started later"
        await watcher.close()
        return started

    async def main() -> None:
        children = set(psutil.Process().children())
        outcomes = [await start_with(free_count) for free_count in range(10)]
        assert set(psutil.Process().children()) <= children  # one of an earlier test may end meanwhile
        failures = outcomes.count(False)
        assert outcomes == [False] * failures + [True] * (10 - failures)
        assert 3 <= failures < 10, "a pipe and a pidfd, and those of the start itself"

    asyncio.run(main())


def test_a_number_that_another_process_has_now_is_left_alone(worker: FakeWorkerProcess) -> None:
    stat = stat_of(worker.session)
    assert stat is not None
    other = {worker.session: stat.started - 1}
    assert members_of(other) == []
    assert other == {}
    end_sessions({worker.session: 0})
    assert lives(worker.session)
    assert lives(worker.child)
    ours = {worker.session: stat.started}
    assert sorted(members_of(ours)) == [(worker.session, worker.session), (worker.child, worker.session)]


def test_lines_of_the_kernel_may_come_in_parts(worker: FakeWorkerProcess) -> None:
    watch = Watch()
    line = b"+%d\n" % worker.session
    watch.feed(line[:3])
    assert watch.sessions == {}
    watch.feed(line[3:] + b"+1073741824\n-1073741824\n-1073741825\n")
    stat = stat_of(worker.session)
    assert stat is not None
    assert watch.sessions == {worker.session: stat.started}


def test_the_sessions_of_workers_that_end_one_after_the_other_are_ended_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[dict[int, int]] = []
    monkeypatch.setattr("backends.launch.session_watcher.end_sessions", ended.append)
    now_s = [100.0]
    monkeypatch.setattr("backends.launch.session_watcher.time.monotonic", lambda: now_s[0])
    watch = Watch()
    watch.sessions = {1: 10, 2: 20, 3: 30}
    assert watch.end_due() is None
    watch.feed(b"-1\n")
    assert watch.end_due() is None
    watch.feed(b"-2\n-3\n")
    assert watch.end_due() == pytest.approx(0.05)
    now_s[0] += 0.06
    assert watch.end_due() is None
    assert ended == [{1: 10}, {2: 20, 3: 30}]
