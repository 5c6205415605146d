"""Workers of this machine, however they are started: what they are to the system, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import sys
from pathlib import Path

import psutil
import pytest

from backends.launch.spawning import SpawningLauncher
from backends.launch.watcher_process import SessionWatcher
from backends.transport import wire
from tests.backends.launch.started_workers import (
    STARTS,
    end_of,
    hello_of,
    launch,
    run,
    stop,
    worker_processes,
)
from tests.open_descriptors import open_descriptors


class RecordingWatcher(SessionWatcher):
    """Has no process, and keeps the sessions that live."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: set[int] = set()

    def add(self, session: int) -> None:
        self.sessions.add(session)

    def remove(self, session: int) -> None:
        self.sessions.remove(session)


@pytest.mark.parametrize("start", STARTS)
def test_a_worker_says_hello_and_ends_when_the_kernel_is_gone(start: str) -> None:
    async def scenario() -> None:
        async with worker_processes(start) as processes:
            launched = await launch(processes.launcher)
            hello = await hello_of(launched)
            assert (hello.protocol, hello.pid, hello.local) == (wire.PROTOCOL, launched.pid, True)
            launched.socket.close()
            assert await end_of(launched) == "exit code 0"

    run(scenario())


@pytest.mark.parametrize("start", STARTS)
def test_a_worker_is_as_separate_from_others_as_the_system_allows(start: str) -> None:
    async def scenario() -> None:
        async with worker_processes(start) as processes:
            first = await launch(processes.launcher, "m_0")
            worker = await launch(processes.launcher, "m_1")
            await hello_of(first)
            await hello_of(worker)
            assert os.getsid(worker.pid) == worker.pid, "signals of the terminal do not reach it"
            assert os.getpgid(worker.pid) == worker.pid
            found = psutil.Process(worker.pid)
            assert found.ppid() == os.getpid()
            assert found.name() == "m_1"
            assert "--model=m_1" in found.cmdline()
            assert _targets(worker.pid)[0] == "/dev/null"
            assert len({_targets(worker.pid)[1], _targets(worker.pid)[2]}) == 2
            assert len(_sockets(worker.pid)) == 1
            assert _sockets(worker.pid).isdisjoint(_sockets(first.pid) | _sockets(os.getpid())), "sockets of others"
            assert "SigBlk:\t0000000000000000" in Path(f"/proc/{worker.pid}/status").read_text()
            python = {signal.SIGPIPE, signal.SIGXFSZ}  # the interpreter ignores them
            assert _ignored(worker.pid) - _ignored(os.getpid()) - python == {signal.SIGINT} - _ignored(os.getpid())
            assert signal.SIGTERM not in _ignored(worker.pid)
            await stop(first)
            await stop(worker)

    run(scenario())


@pytest.mark.parametrize("start", STARTS)
def test_a_killed_worker_is_lost_with_its_signal(start: str) -> None:
    async def scenario() -> None:
        async with worker_processes(start) as processes:
            launched = await launch(processes.launcher)
            await hello_of(launched)
            assert not launched.stopped
            os.kill(launched.pid, signal.SIGSEGV)
            assert await end_of(launched) == "killed by signal 11 (SIGSEGV)"
            assert not Path(f"/proc/{launched.pid}").exists(), "it was waited for"
            launched.socket.close()

    run(scenario())


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("helper", [False, True])
def test_a_worker_that_is_killed_before_its_first_message_is_lost_as_well(start: str, helper: bool) -> None:
    async def scenario() -> None:
        async with worker_processes(start) as processes:
            launcher = processes.helper_launcher if helper else processes.launcher
            launched = await launcher.launch("m_0", helper=helper)
            launched.kill()
            assert await end_of(launched) == "killed by signal 9 (SIGKILL)"
            launched.socket.close()

    run(scenario())


@pytest.mark.parametrize("start", STARTS)
def test_a_helper_has_low_priority(start: str) -> None:
    async def scenario() -> None:
        async with worker_processes(start) as processes:
            launched = await processes.helper_launcher.launch("helper", helper=True)
            hello = await hello_of(launched)
            assert os.getpriority(os.PRIO_PROCESS, hello.pid) == 10
            await stop(launched)

    run(scenario())


@pytest.mark.parametrize("start", STARTS)
def test_a_helper_is_not_there_before_it_has_imported_its_tasks(start: str) -> None:
    """The import takes a moment, for which no request is to wait. One that cannot be imported shows the order."""

    async def scenario() -> None:
        async with worker_processes(start, "tests.no_tasks") as processes:
            launched = await processes.helper_launcher.launch("helper", helper=True)
            with pytest.raises(AssertionError, match="the worker has ended"):
                await hello_of(launched)
            assert await end_of(launched) == "exit code 1"
            launched.socket.close()

    run(scenario())


@pytest.mark.parametrize("start", STARTS)
def test_what_a_worker_prints_is_logged_under_its_title(start: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with worker_processes(start) as processes:
            launched = await launch(processes.launcher)
            launched.socket.send(b"\xff\xff\xff\xff")  # a length that no message has: the worker fails
            assert await end_of(launched) == "exit code 1"
            launched.socket.close()

    with caplog.at_level(logging.WARNING, "model"):
        run(scenario())
    assert any("m_0: " in record.getMessage() and "BadFrame" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("helper", [False, True])
def test_the_session_of_a_worker_or_helper_is_watched_until_it_has_ended(helper: bool) -> None:
    async def scenario() -> None:
        watcher = RecordingWatcher()
        launcher = SpawningLauncher(task_module="tests.backends.helper.task_functions", watcher=watcher)
        launched = await launcher.launch("m_0", helper=helper)
        assert watcher.sessions == {launched.pid}
        await stop(launched)
        assert watcher.sessions == set()

    run(scenario())


def test_a_worker_that_cannot_be_spawned_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
        before = open_descriptors()
        with pytest.raises(FileNotFoundError):
            await SpawningLauncher().launch("m_0")
        assert open_descriptors() <= before

    run(scenario())


@pytest.mark.parametrize("start", STARTS)
def test_a_start_without_enough_descriptors_leaves_nothing_behind(start: str) -> None:
    """As many as a worker needs, one after the other, are there before the next one lacks."""

    async def scenario() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with worker_processes(start) as processes:
            await stop(await launch(processes.launcher))  # the watcher was started with it
            children = set(psutil.Process().children())
            outcomes = []
            for free_count in range(20):
                before = open_descriptors()
                free = [fd for fd in range(len(before) + free_count + 1) if fd not in before]
                try:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (free[free_count], hard))
                    launched = await launch(processes.launcher, "m")
                except OSError as error:
                    outcomes.append(errno.errorcode[error.errno or 0])
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                    # Not equal: garbage of earlier tests may be collected meanwhile.
                    assert open_descriptors() <= before
                    assert set(psutil.Process().children()) <= children
                else:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                    await stop(launched)
                    outcomes.append("started")
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            failures = outcomes.count("EMFILE")
            assert outcomes == ["EMFILE"] * failures + ["started"] * (20 - failures)
            assert failures > 6, "a socket pair, two pipes and a pidfd"

    run(scenario())


def _targets(pid: int) -> dict[int, str]:
    """Return what the descriptors of a process refer to."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found[int(fd)] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def _sockets(pid: int) -> set[str]:
    """Return the sockets of a process, each by the name of its end."""
    return {target for target in _targets(pid).values() if target.startswith("socket:")}


def _ignored(pid: int) -> set[signal.Signals]:
    """Return the signals that a process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:\t")[2].split()[0], 16)
    return {number for number in signal.Signals if mask >> (number - 1) & 1}
