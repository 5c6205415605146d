"""The kernel's side of one zygote (`backends/zygote/zygote.py`), from its start to its end."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

import msgspec

from backends.launch.launcher import describe_exit
from backends.launch.output import OutputCapture, WorkerOutput
from backends.launch.working import done_while_working, is_stopped, work_mark
from backends.launch.zygote_start import StartedZygote
from backends.transport import zygote_messages as messages
from backends.transport.texts import shortened
from kernel.errors import InvalidArgument
from kernel.loop.clock import LoopClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.launch.children import KernelChildren
    from backends.launch.output import OutputLimits
    from kernel.repository.worker_needs import PreloadSet

logger = logging.getLogger(__name__)

#: How long a zygote that is to fork a worker, with the import of its backend, may do nothing, and how long it may take
#: to import what a model has chosen, in seconds.
FORK_TIMEOUT_S = 30.0
PRELOAD_TIMEOUT_S = 300.0

#: How many requests to fork may wait for a response. The socket has room for at least this number.
MAX_FORKS = 16


class ZygoteLost(Exception):
    """The zygote has ended, and has not forked the worker. The message is the cause."""


class BackendLeavesThreads(Exception):
    """The worker was not forked, because its backend was imported and there are these threads. The zygote has ended."""


class PreloadLeavesThreads(Exception):
    """What a model has chosen to preload has left these threads, so no worker can be forked. The zygote has ended."""


class ZygoteProcess:
    """A process that forks workers. Its owner calls `end`, and is called by `on_ended` with the cause of its end."""

    def __init__(
        self,
        preload: PreloadSet,
        children: KernelChildren,
        output_limits: OutputLimits,
        on_ended: Callable[[ZygoteProcess, str], None],
        started: StartedZygote | None = None,
    ) -> None:
        """Start the process, or take over the one that was `started`, and let it import `preload`. Raises `OSError`."""
        self.preload = preload
        self._children = children
        self._on_ended = on_ended
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.Semaphore(MAX_FORKS)
        self._forks: dict[int, asyncio.Future[int]] = {}
        #: Whether the owner has ended it.
        self._ending = False
        self.ended = False
        #: Set when what the model has chosen is imported.
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # nobody may wait for it
        title = ", ".join(("zygote", *preload.modules))
        started = StartedZygote() if started is None else started
        try:
            self._pidfd = os.pidfd_open(started.process.pid)
        except OSError:
            started.end()
            raise
        started.take()
        self._process, self._socket = started.process, started.socket
        self._capture = OutputCapture(WorkerOutput(title, output_limits, LoopClock()), started.pipes)
        children.add(self._process.pid)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._readable)
        self._loop.add_reader(self._pidfd, self._exited)
        self._timer = self._loop.call_later(PRELOAD_TIMEOUT_S, self._too_slow)
        if preload.modules or preload.file:
            self._socket.send(messages.encode(messages.PreloadChosen(preload.modules, preload.file)))
        else:
            self._is_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def forks(self) -> bool:
        """Whether it has not ended, and is not being ended."""
        return not (self.ended or self._ending)

    async def ready(self) -> None:
        """Wait until what the model has chosen is imported.

        Raises `ZygoteLost`, and, when the zygote ends because of them, `InvalidArgument` if it cannot be imported and
        `PreloadLeavesThreads`.
        """
        await asyncio.shield(self._ready)

    async def fork(self, request: messages.ForkWorker, fds: list[int]) -> int:
        """Fork a worker; returns its process id. It is a child of this process, which has to wait for its end.

        `fds` are the worker's ends, see `WorkerEnds.worker_fds`; the caller closes them. The zygote must be ready.
        Raises `ZygoteLost`, `BackendLeavesThreads`, and `OSError` if the system does not fork.
        """
        async with self._limit:
            if self.ended:
                raise ZygoteLost("it has ended")
            number = next(self._numbers)
            future = self._forks[number] = self._loop.create_future()
            try:
                self._send(msgspec.structs.replace(request, number=number), fds)
                limit_s = FORK_TIMEOUT_S
                if not await done_while_working(future, lambda: work_mark(self.pid), limit_s, self._is_stopped):
                    stopped = "a signal (SIGSTOP) has stopped it"
                    self._drop(stopped if self._is_stopped() else f"it did not start a worker within {limit_s:g} s")
                    raise ZygoteLost("it did not respond")
                pid: int = future.result()
                # What models preload runs in the zygote: like a worker, it is not trusted.
                if not _is_child(pid):
                    self._drop(f"it says that it has forked process {pid}, which is no child of this one")
                    raise ZygoteLost("it sent a wrong message")
                return pid
            finally:
                del self._forks[number]

    def end(self) -> None:
        """End the process. Workers that it has forked stay. `on_ended` follows, unless it was called already."""
        self._ending = True
        if not self.ended:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    # ---- the process -------------------------------------------------------------------------

    def _send(self, request: messages.ForkWorker, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ends: `_exited` follows
            self._socket.sendmsg([messages.encode(request)], rights)

    def _readable(self) -> None:
        data = self._receive()
        if data:
            self._handle(data)
        elif data is not None:
            self._loop.remove_reader(self._socket)  # it ends: `_exited` follows

    def _receive(self) -> bytes | None:
        """Return the next message, b"" at the end of the connection, None if there is nothing now."""
        try:
            return self._socket.recv(messages.MAX_MESSAGE)
        except (BlockingIOError, ConnectionResetError):
            # A reset says once that the zygote has not read all requests. What it had sent before comes after that.
            return None

    def _handle(self, data: bytes) -> None:
        try:
            message = messages.to_kernel_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._drop(f"it has sent an invalid message: {error}")
            return
        match message:
            case messages.Preloaded():
                self._is_ready()
            case messages.Forked(number=number, pid=pid):
                # If nobody waits any more, the worker finds its connection closed, and ends.
                if future := self._waiting(number):
                    future.set_result(pid)
            case messages.ForkFailed(number=0, text=text):
                self._ready.set_exception(InvalidArgument(f"the preload failed: {shortened(text)}"))
                self.end()
            case messages.ForkFailed(number=number, text=text, error_number=code):
                if future := self._waiting(number):
                    future.set_exception(OSError(code, text))
            case messages.ThreadsLeft(number=0, text=text):
                self._ending = True
                if not self._ready.done():
                    self._ready.set_exception(PreloadLeavesThreads(text))
            case messages.ThreadsLeft(number=number, backend=backend, text=text):
                logger.warning("backend '%s' leaves %s when imported: it is imported after the fork", backend, text)
                self._ending = True
                if future := self._waiting(number):
                    future.set_exception(BackendLeavesThreads(text))

    def _is_stopped(self) -> bool:
        return not self.ended and is_stopped(self._pidfd)

    def _drop(self, problem: str) -> None:
        logger.error("a zygote is killed: %s", problem)
        self.end()

    def _waiting(self, number: int) -> asyncio.Future[int] | None:
        future = self._forks.get(number)
        return None if future is None or future.done() else future

    def _is_ready(self) -> None:
        self._timer.cancel()
        if not self._ready.done():
            self._ready.set_result(None)

    def _too_slow(self) -> None:
        if not self._ready.done():
            text = f"the preload was not done after {PRELOAD_TIMEOUT_S:.0f} s"
            self._ready.set_exception(InvalidArgument(text))
        self.end()

    def _exited(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._socket)
        os.close(self._pidfd)
        cause = describe_exit(self._process.wait())
        self._children.remove(self._process.pid)
        self.ended = True
        for _ in range(MAX_FORKS + 1):  # what it has sent before its end, and perhaps a reset
            if data := self._receive():
                self._handle(data)
        self._socket.close()
        self._capture.close()
        for future in self._forks.values():
            if not future.done():
                future.set_exception(ZygoteLost(cause))
        if not self._ready.done():
            text = f"the preload failed: its process has ended ({cause})"
            self._ready.set_exception(ZygoteLost(cause) if self._ending else InvalidArgument(text))
        self._on_ended(self, "" if self._ending else cause)


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
