"""What the kernel inherits: what models leave behind ends and is waited for, and nobody else's child is touched."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backends.launch.children import Inherited, KernelChildren, is_left_behind
from backends.transport.zygote_messages import MARK
from tests.backends.launch.started_workers import run, until

#: Forks a process that waits, in a session of its own, writes its number, and ends: the process is inherited.
LEAVES_A_DAEMON = """
import os, signal
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid == 0:
        os.closerange(0, 3)
        signal.pause()
    print(pid, flush=True)
    os._exit(0)
os.wait()
"""

#: The marks of workers that live, by their sessions.
WORKERS = {7: "1.7", 8: "1.8"}


def lives(pid: int) -> bool:
    """Whether a process lives, or has ended and was not waited for."""
    return Path(f"/proc/{pid}").exists()


def ends_with(code: int, *, session: bool) -> subprocess.Popen[bytes]:
    """Start a child that ends with this code."""
    return subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"], start_new_session=session)


def waits() -> subprocess.Popen[bytes]:
    """Start a child that waits to be killed."""
    return subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])


def wait_until_ended(pid: int) -> None:
    """Wait for the end of a child, which can be waited for again."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def leave_daemon(mark: str) -> int:
    """Start and end a worker with this mark; returns the process that it leaves behind."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", LEAVES_A_DAEMON],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.parametrize(
    ("child", "left"),
    [
        (Inherited(9, session=7, ended=False, mark="1.7"), False),
        (Inherited(9, session=9, ended=False, mark="1.7"), False),
        (Inherited(9, session=9, ended=False, mark="1.6"), True),
        (Inherited(9, session=6, ended=False, mark="1.6"), True),
        (Inherited(9, session=9, ended=False, mark=""), False),
        (Inherited(9, session=7, ended=False, mark="1.6"), False),
    ],
)
def test_a_process_is_left_behind_if_the_worker_with_its_mark_has_ended(child: Inherited, left: bool) -> None:
    assert is_left_behind(child, WORKERS) == left


def test_what_a_worker_leaves_behind_in_another_session_ends_with_it() -> None:
    async def scenario() -> None:
        children = KernelChildren()
        children.inherit()
        worker = waits()
        mark = children.new_mark()
        children.add(worker.pid, mark)
        daemon, other = leave_daemon(mark), leave_daemon("another")
        await until(lambda: not lives(other))
        assert lives(daemon), "its worker lives"
        worker.kill()
        worker.wait()
        children.remove(worker.pid)
        await until(lambda: not lives(daemon))
        await children.close()

    run(scenario())


def test_an_inherited_process_without_a_mark_ends_with_the_server() -> None:
    async def scenario() -> None:
        children = KernelChildren()
        children.inherit()
        unmarked, marked = leave_daemon(""), leave_daemon("another")
        await until(lambda: not lives(marked))
        assert lives(unmarked)
        await children.close()
        assert not lives(unmarked)

    run(scenario())


def test_children_of_others_keep_their_ends() -> None:
    async def scenario() -> None:
        earlier = ends_with(4, session=True)
        children = KernelChildren()
        children.inherit()
        own_session = ends_with(5, session=False)
        recorded = ends_with(6, session=True)
        children.add(recorded.pid)
        threaded = await asyncio.to_thread(ends_with, 7, session=True)
        others = (earlier, own_session, recorded, threaded)
        for other in others:
            wait_until_ended(other.pid)
        daemon = leave_daemon("another")
        await until(lambda: not lives(daemon))
        await children.close()
        assert [other.wait() for other in others] == [4, 5, 6, 7]

    run(scenario())


def test_while_a_worker_is_being_forked_nothing_is_taken() -> None:
    async def scenario() -> None:
        children = KernelChildren()
        children.inherit()
        with children.forking():
            forked = leave_daemon("its zygote has not said its number yet")
            os.kill(forked, signal.SIGKILL)
            wait_until_ended(forked)
            children.remove(0)  # looks soon
            looked = asyncio.Event()
            asyncio.get_running_loop().call_later(0.02, looked.set)
            await looked.wait()
            assert os.waitpid(forked, os.WNOHANG) == (forked, signal.SIGKILL)  # noqa: ASYNC222 - it has ended
        await children.close()

    run(scenario())


def test_processes_are_no_subreapers_after_the_end_of_the_server() -> None:
    async def scenario() -> None:
        children = KernelChildren()
        children.inherit()
        await children.close()
        daemon = leave_daemon("another")
        stat = Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()
        assert int(stat[1]) != os.getpid()
        os.kill(daemon, signal.SIGKILL)

    run(scenario())
