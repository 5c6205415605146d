"""A worker process on this machine, from its start to its end, and what connects it with the kernel.

It is connected by a socket, and by pipes for what it prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, NamedTuple, Protocol

from backends.launch.launcher import KILL_WAIT_S, describe_exit
from backends.launch.memory_limit import MemoryKills, limit_memory
from backends.launch.output import OutputCapture, WorkerOutput
from backends.launch.working import is_stopped, work_mark
from backends.transport.wire import STACKS_SIGNAL
from kernel.loop.clock import LoopClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.launch.launcher import Announce
    from backends.launch.memory_limit import MemoryLimit
    from backends.launch.output import OutputLimits
    from backends.launch.watcher_process import SessionWatcher


class GivenEnds(NamedTuple):
    """What connects a worker with a kernel on another host, in place of a pair of sockets and this process's log."""

    #: The worker's end of the connection; it is closed here when the worker has it.
    worker_socket: socket.socket
    #: Takes what the worker prints.
    output: WorkerOutput


class WorkerEnds:
    """Both ends of what connects a worker with the kernel."""

    def __init__(self, title: str, limits: OutputLimits, given: GivenEnds | None = None) -> None:
        """With `given` ends the kernel's is elsewhere, and `kernel_socket` is closed.

        Raises `OSError`; then nothing is open.
        """
        if given is None:
            self.kernel_socket, self.worker_socket = socket.socketpair()
            output = WorkerOutput(title, limits, LoopClock())
        else:
            (self.kernel_socket, other), self.worker_socket = socket.socketpair(), given.worker_socket
            self.kernel_socket.close()
            other.close()
            output = given.output
        try:
            self.capture = OutputCapture(output)
        except BaseException:
            self.kernel_socket.close()
            self.worker_socket.close()
            raise

    @property
    def worker_fds(self) -> list[int]:
        """The worker's ends: of the socket, of its standard output, of its standard error."""
        return [self.worker_socket.fileno(), self.capture.stdout_fd, self.capture.stderr_fd]


@contextlib.contextmanager
def worker_ends(title: str, limits: OutputLimits, given: GivenEnds | None = None) -> Iterator[WorkerEnds]:
    """Open the ends of a worker, whose output is logged under `title`, if they are not `given`. Raises `OSError`.

    After the block the worker's ends are closed here. The kernel's ends are too if the block raises; else they are the
    caller's.
    """
    ends = WorkerEnds(title, limits, given)
    try:
        yield ends
    except BaseException:
        ends.kernel_socket.close()
        ends.capture.close()
        raise
    finally:
        ends.worker_socket.close()
        ends.capture.close_child_ends()


logger = logging.getLogger(__name__)

#: What a process may take to write its stacks, in seconds. SIGTERM would end it before.
_STACKS_S = 0.1

memory_kills = MemoryKills()


class ChildProcess(Protocol):
    """A child of this process for which no other code waits. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its process id, which no other process can have before `wait` has returned."""

    def wait(self) -> int:
        """Wait for its end. Returns the exit code, or the negative number of the signal that has ended it."""


class LocalProcess:
    """A worker process on this machine, watched by its pidfd."""

    def __init__(
        self,
        process: ChildProcess,
        sock: socket.socket,
        capture: OutputCapture,
        watcher: SessionWatcher | None = None,
    ) -> None:
        """The process leads a session of its own, which `watcher` ends after it."""
        self.socket = sock
        self.host = ""
        self.unreachable = False
        self._watcher = watcher
        self._on_ended: list[Callable[[], None]] = []
        self.output = capture.output
        self.pid = process.pid
        self._process = process
        self._capture = capture
        self._callback: Callable[[str], None] | None = None
        self._ended = asyncio.Event()
        self._cause = ""
        self._killed = False
        self._memory_limit: MemoryLimit | None = None
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)
        if watcher is not None:
            watcher.add(process.pid)

    def folder(self, path: str) -> str:
        """The worker uses the folder itself."""
        return path

    async def connect(self, announce: Announce) -> socket.socket:
        """Return one end of a pair of sockets; the process gets the descriptor of the other one."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                announce(theirs.fileno())
            except BaseException:
                ours.close()
                raise
        return ours

    def on_lost(self, callback: Callable[[str], None]) -> None:
        if self._ended.is_set():
            asyncio.get_running_loop().call_soon(callback, self._cause)
        else:
            self._callback = callback

    def on_ended(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the process has ended and was waited for, before the callback of `on_lost`."""
        self._on_ended.append(callback)

    def limit_memory(self, byte_size: int) -> None:
        """Let the process be ended when it uses more memory, in bytes. The cause of its end has the figures."""
        if not self._ended.is_set():
            self._memory_limit = limit_memory(self.pid, byte_size, self.kill)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def stopped(self) -> bool:
        return not self._ended.is_set() and is_stopped(self._pidfd)

    @property
    def work_mark(self) -> tuple[int, str] | None:
        return None if self._ended.is_set() else work_mark(self.pid)

    def write_stacks(self) -> None:
        """Let the process write its stacks to standard error: to the process alone, its children may not be ready."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(self._pidfd, STACKS_SIGNAL)

    def terminate(self) -> None:
        """Send SIGTERM to the process and all processes of its group, after the process has written its stacks.

        Only for a worker that has loaded its model, as `write_stacks`.
        """
        self.write_stacks()
        asyncio.get_running_loop().call_later(_STACKS_S, self._signal, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all processes of its group."""
        self._killed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has not made its group yet
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    async def stop(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            text = f"the worker (process {self.pid}) did not end within {grace_s:.1f} s"
            self.output.log_always(logging.WARNING, f"{text} (finalize, or threads of the model) and is killed")
            self.kill()
            await self._wait_for_kill()

    async def _wait_for_kill(self) -> None:
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await self._ended.wait()
        except TimeoutError:  # the unload of a model, and the end of the server, must not wait without end
            logger.error("worker %d could not be killed: it is in a system call that does not end", self.pid)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._cause = describe_exit(code)
        limit, self._memory_limit = self._memory_limit, None
        if limit is not None and (explanation := limit.explanation()):
            self._cause += f": {explanation}"
        elif code == -signal.SIGKILL and not self._killed and memory_kills.explain_kill():
            self._cause += ", probably by the system because memory ran out"
        # Processes that the model started must not outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._watcher is not None:  # those with a process group of their own
            self._watcher.remove(self.pid)
        if limit is not None:
            limit.close()
        for callback in self._on_ended:
            callback()
        self._capture.close()
        self._ended.set()
        if self._callback is not None:
            self._callback(self._cause)
