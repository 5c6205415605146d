"""The kernel's side of the watcher, see `backends/launch/session_watcher.py`.

The watcher is started with the first worker. If it ends, the server continues, and another one is started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from backends.launch import session_watcher
from backends.launch.children import KernelChildren
from backends.launch.launcher import Backoff
from backends.transport.zygote_messages import MARK, MARK_OPTION

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

#: How long the watcher may take to end, in seconds.
_STOP_GRACE_S = 5.0


class SessionWatcher:
    """Gives the watcher the sessions of workers. Never waits for it."""

    def __init__(self, children: KernelChildren | None = None) -> None:
        """`children` records the watcher's process."""
        self._children = children or KernelChildren()
        self._sessions: set[int] = set()
        self._backoff = Backoff()
        self.restart: asyncio.TimerHandle | None = None
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        #: The watcher's standard input, its pidfd, and whether it has ended.
        self._input_fd = self._pidfd = -1
        self.ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """The process id of the watcher; 0 if it does not run."""
        return 0 if self._process is None else self._process.pid

    def add(self, session: int) -> None:
        """A worker has started as the leader of `session`."""
        self._sessions.add(session)
        if self._process is not None:
            self._write(b"+", [session])
        elif self.restart is None:
            self._start()

    def remove(self, session: int) -> None:
        """The worker has ended: let the watcher end the rest of its session, unless it was closed and has done so."""
        self._sessions.discard(session)
        if self._process is not None and not self._closed:
            self._write(b"-", [session])

    async def close(self) -> None:
        """End the watcher, which ends the sessions that it still knows."""
        self._closed = True
        if self.restart is not None:
            self.restart.cancel()
        if self._process is None:
            return
        self._send(b".\n")
        self._close_input()
        try:
            async with asyncio.timeout(_STOP_GRACE_S):
                await self.ended.wait()
        except TimeoutError:
            self._process.kill()
            await self.ended.wait()

    # ---- the process -------------------------------------------------------------------------

    def _start(self) -> None:
        self.restart = None
        try:
            self._process = self._launch()
        except OSError as error:  # such as no descriptor that is left
            self._close_input()
            self._start_later(f"cannot be started: {error}")
            return
        self.ended.clear()
        self._children.add(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)
        self._write(b"+", sorted(self._sessions))

    def _launch(self) -> subprocess.Popen[bytes]:
        """Start the process, and open its input and its pidfd. Raises `OSError`."""
        command = [sys.executable, "-I", "-S", session_watcher.__file__, str(os.getpid()), MARK, MARK_OPTION]
        theirs, self._input_fd = os.pipe2(os.O_CLOEXEC)
        try:
            # A session of its own: signals to the kernel's process group do not reach it.
            process = subprocess.Popen(
                command,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        os.set_blocking(self._input_fd, False)
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        return process

    def _write(self, verb: bytes, sessions: Iterable[int]) -> None:
        self._send(b"".join(b"%s%d\n" % (verb, session) for session in sessions))

    def _send(self, lines: bytes) -> None:
        assert self._process is not None
        try:
            os.write(self._input_fd, lines)
        except BlockingIOError:  # it has read nothing for thousands of lines; the next one gets all sessions at once
            self._process.kill()
        except BrokenPipeError:
            pass  # it has ended, `_exited` follows

    def _exited(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._children.remove(self._process.pid)
        self._process = None
        self._close_input()
        self.ended.set()
        if not self._closed:
            self._start_later(f"has ended with code {code}")

    def _close_input(self) -> None:
        if self._input_fd >= 0:
            os.close(self._input_fd)
            self._input_fd = -1

    def _start_later(self, problem: str) -> None:
        """Start another watcher. Without one, workers are still killed with the kernel."""
        delay_s = self._backoff.next_delay_s()
        logger.warning(
            "the watcher (it ends processes of models if the server is killed) %s; it is started again in %.0f s",
            problem, delay_s,
        )  # fmt: skip
        self.restart = asyncio.get_running_loop().call_later(delay_s, self._start)
