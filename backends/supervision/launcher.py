"""Starts workers. Supervision uses only these interfaces, and does not know where workers run.

`LocalLauncher` starts processes on this machine. A launcher for other hosts returns a `Launched` over its own
connection; workers there share no memory with the kernel (`backends/supervision/remote_memory.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Protocol

from backends.supervision.output_capture import OutputCapture

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: How long to wait for the end of a killed process, in seconds.
KILL_WAIT_S = 10.0


class Launched(Protocol):
    """A started worker. The code that launched it calls `stop` or `kill` at the end."""

    #: The kernel's end of the framed connection. The channel that uses it owns it.
    socket: socket.socket

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` once, with the cause, when the worker has ended for any reason."""

    @property
    def stopped(self) -> bool:
        """Whether the worker does not run, although it has not ended: a signal has stopped its process.

        The watchdog asks often, so it must be cheap. A launcher for other hosts has to know it without asking the
        worker, which does not respond then, nor while its model executes.
        """

    def terminate(self) -> None:
        """Ask the worker and the processes that it started to end (SIGTERM). `on_lost` follows if the worker does."""

    def kill(self) -> None:
        """Kill the worker. `on_lost` follows."""

    async def stop(self, grace_s: float) -> None:
        """Wait at most `grace_s` seconds until the worker has ended by itself, then kill it.

        Returns also if it cannot be killed.
        """


class Launcher(Protocol):
    """Starts workers."""

    async def launch(self, title: str, *, helper: bool = False) -> Launched:
        """Start a worker whose output is logged under `title`. Raises `OSError`.

        A `helper` runs no model, has low priority, and always shares memory with the kernel.
        """


class LocalLauncher:
    """Starts workers on this machine, each as a new interpreter."""

    def __init__(self, *, shared_memory: bool = True, task_module: str = "") -> None:
        """Without `shared_memory` tensors are sent over the connection, as to workers of other hosts.

        `task_module` is the module whose functions helpers run as tasks.
        """
        self.shared_memory = shared_memory
        self._task_module = task_module

    async def launch(self, title: str, *, helper: bool = False) -> Launched:
        """See `Launcher`."""
        ours, theirs = socket.socketpair()
        try:
            capture = OutputCapture(title)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        try:
            # A session of its own: only the kernel gets signals of the terminal, and the worker can be killed
            # together with the processes that its model started.
            process = subprocess.Popen(  # noqa: ASYNC220 - returns once the child is forked
                [
                    sys.executable,
                    "-m",
                    "backends.worker",
                    f"--model={title}",
                    f"--fd={theirs.fileno()}",
                    f"--kernel={os.getpid()}",
                    *([f"--helper={self._task_module}"] if helper else []),
                    *([] if self.shared_memory or helper else ["--remote"]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=capture.stdout_fd,
                stderr=capture.stderr_fd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            capture.close()
            raise
        finally:
            theirs.close()
            capture.close_child_ends()
        try:
            return LocalProcess(process, ours, capture)
        except OSError:  # no descriptor is left to watch it
            process.kill()
            process.wait()
            ours.close()
            capture.close()
            raise


class LocalProcess:
    """A worker process on this machine, watched by its pidfd."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, capture: OutputCapture) -> None:
        self.socket = sock
        self.pid = process.pid
        self._process = process
        self._capture = capture
        self._callback: Callable[[str], None] | None = None
        self._ended = asyncio.Event()
        self._cause = ""
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        if self._ended.is_set():
            asyncio.get_running_loop().call_soon(callback, self._cause)
        else:
            self._callback = callback

    @property
    def stopped(self) -> bool:
        # One system call, which leaves the report for the next call (waitid(2)). A process that a debugger holds does
        # not count as stopped.
        if self._ended.is_set():
            return False
        try:
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return found is not None

    def terminate(self) -> None:
        """Send SIGTERM to the process and all processes of its group."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all processes of its group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def stop(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("worker %d did not end within %.1f s and is killed", self.pid, grace_s)
            self.kill()
            await self._wait_for_kill()

    async def _wait_for_kill(self) -> None:
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await self._ended.wait()
        except TimeoutError:  # the unload of a model, and the end of the server, must not wait for ever
            logger.error("worker %d could not be killed: it is in a system call that does not end", self.pid)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._cause = describe_exit(self._process.wait())
        # Processes that the model started must not outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._capture.close()
        self._ended.set()
        if self._callback is not None:
            self._callback(self._cause)


def describe_exit(code: int) -> str:
    """Return how a process ended, as text: `killed by signal 9 (SIGKILL)` or `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    return f"killed by signal {-code} ({name})"
