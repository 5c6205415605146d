"""One model of a process that several share, as the supervision of its instance sees it: a `Launched` worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Protocol

from backends.supervision.launcher import KILL_WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from backends.supervision.launcher import Announce
    from backends.supervision.output.worker_output import WorkerOutput

logger = logging.getLogger(__name__)

#: How long a model may take to leave after its connection was ended, in seconds. Then its process is killed.
LEAVE_GRACE_S = 2.0


class HostProcess(Protocol):
    """The process, as its members see it."""

    name: str

    def folder(self, path: str) -> str:
        """See `Launched`."""

    async def connect(self, announce: Announce) -> socket.socket:
        """See `Launched`."""

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process."""

    @property
    def work_mark(self) -> Hashable:
        """See `Launched`."""

    def write_stacks(self) -> None:
        """See `Launched`."""

    def terminate(self) -> None:
        """Send SIGTERM to the process."""

    def kill(self) -> None:
        """Kill the process. All members are lost."""

    async def emptied(self) -> None:
        """Wait until the process has ended, if it has no members any more."""


class SharedWorker:
    """Implements `Launched`. A thread cannot be killed: a model that does not leave is ended with its process."""

    def __init__(self, title: str, sock: socket.socket, output: WorkerOutput, process: HostProcess) -> None:
        """The channel that uses `sock` owns it."""
        self.title = title
        self.socket = sock
        self.output = output
        self._process = process
        self._callback: Callable[[str], None] | None = None
        self._ended = asyncio.Event()
        self._cause = ""
        self._grace: asyncio.TimerHandle | None = None

    def folder(self, path: str) -> str:
        return self._process.folder(path)

    async def connect(self, announce: Announce) -> socket.socket:
        return await self._process.connect(announce)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        if self._ended.is_set():
            asyncio.get_running_loop().call_soon(callback, self._cause)
        else:
            self._callback = callback

    @property
    def stopped(self) -> bool:
        return not self._ended.is_set() and self._process.stopped

    @property
    def work_mark(self) -> Hashable:
        return None if self._ended.is_set() else self._process.work_mark

    def write_stacks(self) -> None:
        """Let the process write the stacks of all its members to its log."""
        if not self._ended.is_set():
            self._process.write_stacks()

    def terminate(self) -> None:
        """Send SIGTERM to the process, which ends all its members."""
        if not self._ended.is_set():
            logger.error("worker '%s' is ended with all its models because of '%s'", self._process.name, self.title)
            self._process.terminate()

    def kill(self) -> None:
        """End the connection, and soon the process, if the model does not leave: it executes, or loads without end."""
        if self._ended.is_set() or self._grace is not None:
            return
        with contextlib.suppress(OSError):  # the channel has closed it
            self.socket.shutdown(socket.SHUT_RDWR)
        self._grace = asyncio.get_running_loop().call_later(LEAVE_GRACE_S, self._kill_process)

    def _kill_process(self) -> None:
        logger.error("worker '%s' is killed with all its models: '%s' does not end", self._process.name, self.title)
        self._process.kill()

    async def stop(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            self._kill_process()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT_S):
                    await self._ended.wait()
        await self._process.emptied()

    def ended(self, cause: str) -> None:
        """The model has left, or its process has ended. Called once."""
        if self._grace is not None:
            self._grace.cancel()
        self._cause = cause
        self.output.close()
        self._ended.set()
        if self._callback is not None:
            self._callback(cause)
