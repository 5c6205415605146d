"""Worker processes on this machine: how their end is noticed, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from backends.launch import local_process, memory_limit
from backends.launch.launcher import describe_exit
from backends.launch.local_process import LocalProcess
from backends.launch.memory_limit import MemoryKills
from backends.launch.output import OutputCapture, OutputLimits, WorkerOutput
from kernel.loop.clock import LoopClock
from tests.backends.launch.started_workers import until

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from backends.launch.launcher import Launched

FOREVER = "import signal; signal.pause()"

#: Ends with code 3 when its standard input ends, and leaves a process behind whose id it writes to its standard output.
LEAVES_A_CHILD = """
import subprocess, sys
from backends.process_control import write_stacks_when_asked
write_stacks_when_asked()
child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'], stdin=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
sys.exit(3)
"""


def started(code: str) -> tuple[LocalProcess, subprocess.Popen[bytes]]:
    """Start a process as a worker is started, which runs `code`."""
    ours, theirs = socket.socketpair()
    capture = OutputCapture(WorkerOutput("m", OutputLimits(), LoopClock()))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=capture.stderr_fd,
        start_new_session=True,
    )
    theirs.close()
    capture.close_child_ends()
    return LocalProcess(process, ours, capture), process


async def end_of(launched: Launched) -> str:
    """Wait for the end of a process; returns its cause."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    launched.on_lost(ended.set_result)
    return await ended


async def readable(fd: int) -> None:
    """Wait until `fd` can be read: of a pidfd, that its process has ended."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    await event.wait()
    loop.remove_reader(fd)


def close(launched: LocalProcess, process: subprocess.Popen[bytes]) -> None:
    launched.socket.close()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("pass", "exit code 0"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "killed by signal 15 (SIGTERM)"),
    ],
)
def test_the_end_of_a_worker_is_heard_once_with_its_cause(code: str, cause: str) -> None:
    async def scenario() -> None:
        launched, process = started(code)
        causes: list[str] = []
        launched.on_lost(causes.append)
        await launched.stop(60)
        assert causes == [cause]
        assert await end_of(launched) == cause, "who asks later hears of it too"
        assert causes == [cause]
        close(launched, process)

    run(scenario())


def test_a_killed_worker_is_lost_like_others() -> None:
    async def scenario() -> None:
        launched, process = started(FOREVER)
        launched.kill()
        assert await end_of(launched) == "killed by signal 9 (SIGKILL)"
        launched.kill()
        close(launched, process)

    run(scenario())


def test_a_worker_that_ends_within_its_grace_is_not_killed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        launched, process = started("import sys; sys.stdin.read(); sys.exit(4)")
        assert process.stdin is not None
        stopping = asyncio.ensure_future(launched.stop(60))
        await asyncio.sleep(0)
        assert not stopping.done()
        process.stdin.close()
        await stopping
        assert await end_of(launched) == "exit code 4"
        close(launched, process)

    run(scenario())
    assert "is killed" not in caplog.text


def test_a_worker_that_does_not_end_within_its_grace_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        launched, process = started(FOREVER)
        await launched.stop(0.001)
        assert await end_of(launched) == "killed by signal 9 (SIGKILL)"
        close(launched, process)

    run(scenario())
    assert "did not end within 0.0 s (finalize, or threads of the model) and is killed" in caplog.text


def test_a_process_that_a_signal_has_stopped_is_seen_as_long_as_it_is_stopped() -> None:
    async def scenario() -> None:
        launched, process = started(FOREVER)
        assert not launched.stopped
        os.kill(launched.pid, signal.SIGSTOP)
        await until(lambda: launched.stopped)
        assert launched.stopped, "a look takes nothing away"
        os.kill(launched.pid, signal.SIGCONT)
        await until(lambda: not launched.stopped)
        os.kill(launched.pid, signal.SIGSTOP)
        await until(lambda: launched.stopped)
        launched.kill()
        assert await end_of(launched) == "killed by signal 9 (SIGKILL)"
        assert not launched.stopped
        close(launched, process)

    run(scenario())


def test_a_worker_is_asked_to_end_with_all_that_it_started_and_says_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        launched, process = started(LEAVES_A_CHILD)
        assert process.stdout is not None
        await readable(process.stdout.fileno())
        child = os.pidfd_open(int(process.stdout.readline()))
        launched.terminate()
        assert await end_of(launched) == "killed by signal 15 (SIGTERM)"
        assert 'm:   File "<string>", line' in caplog.text
        await readable(child)
        os.close(child)
        launched.terminate()
        close(launched, process)

    run(scenario())


def test_nothing_waits_for_ever_for_a_process_that_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        launched, process = started(FOREVER)
        with monkeypatch.context() as patched:
            patched.setattr(LocalProcess, "kill", lambda self: None)
            patched.setattr("backends.launch.local_process.KILL_WAIT_S", 0.001)
            await launched.stop(0.001)
        assert "could not be killed" in caplog.text
        launched.kill()
        assert await end_of(launched) == "killed by signal 9 (SIGKILL)", "its end is noticed all the same"
        close(launched, process)

    run(scenario())


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_model_has_started_ends_with_its_worker(killed: bool) -> None:
    async def scenario() -> None:
        launched, process = started(LEAVES_A_CHILD)
        assert process.stdout is not None
        assert process.stdin is not None
        await readable(process.stdout.fileno())
        child = os.pidfd_open(int(process.stdout.readline()))
        if killed:
            launched.kill()
        else:
            process.stdin.close()
        assert await end_of(launched) == ("killed by signal 9 (SIGKILL)" if killed else "exit code 3")
        await readable(child)
        os.close(child)
        close(launched, process)

    run(scenario())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "exit code 0"),
        (255, "exit code 255"),
        (-signal.SIGSEGV, "killed by signal 11 (SIGSEGV)"),
        (-60, "killed by signal 60"),
    ],
)
def test_an_end_is_described_by_its_code_or_signal(code: int, said: str) -> None:
    assert describe_exit(code) == said


@pytest.mark.parametrize("ended_by", ["the system", "somebody", "the kernel"])
def test_a_kill_because_memory_ran_out_is_named(ended_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 7
    monkeypatch.setattr(memory_limit, "memory_kill_count", lambda: count)
    monkeypatch.setattr(local_process, "memory_kills", MemoryKills())

    async def main() -> None:
        nonlocal count
        launched, process = started(FOREVER)
        if ended_by == "the kernel":
            launched.kill()
        else:
            process.send_signal(signal.SIGKILL)
        count += ended_by != "somebody"
        cause = await end_of(launched)
        explained = cause == "killed by signal 9 (SIGKILL), probably by the system because memory ran out"
        assert explained is (ended_by == "the system")
        close(launched, process)

    asyncio.run(main())
