"""The zygote: forks a worker for each request of the kernel. It runs no model, and never touches a GPU.

It has one thread, because a forked process has only the thread that forks: locks of others would stay locked in it. It
holds no descriptor but its socket and standard streams, and no secret but its environment, so that a worker has nothing
of other workers or of the kernel.

A worker is forked twice. The process in the middle ends at once, so that the worker becomes a child of the nearest
subreaper (PR_SET_CHILD_SUBREAPER): the kernel. So the kernel sees its end as that of a process which it has started
itself. The zygote responds when the process in the middle has ended: then the worker is the kernel's child, and its
process id cannot be reused before the kernel has waited for it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import os
import socket
from typing import TYPE_CHECKING

import msgspec

from backends.transport.channel import descriptors_in
from backends.transport.zygote_messages import (
    MAX_MESSAGE,
    Forked,
    ForkFailed,
    ForkWorker,
    PreloadChosen,
    Preloaded,
    ThreadsLeft,
    encode,
    to_zygote_decoder,
)
from backends.worker.preloading import PreloadFailed
from backends.zygote.preloader import Preloader, ThreadsStarted, thread_names

if TYPE_CHECKING:
    from backends.transport.zygote_messages import ZygoteMessage
    from backends.worker.process import PreparedWorker

_FD_COUNT = 3
_FD_SPACE = socket.CMSG_SPACE(_FD_COUNT * array.array("i").itemsize)


class ForkedWorker(msgspec.Struct, frozen=True, eq=False):
    """What a new process needs to become a worker. It owns the descriptors."""

    request: ForkWorker
    #: The worker's end of its connection, its standard output, and its standard error.
    fds: list[int]
    #: The process between the zygote and this one.
    between: int
    prepared: PreparedWorker


class Zygote:
    """Responds to the kernel. `serve` returns in each forked process, too."""

    def __init__(self, sock: socket.socket, kernel: int) -> None:
        self._socket = sock
        self._kernel = kernel
        self._preloader = Preloader()
        #: Written by the process between, read by the zygote.
        self._worker_pid = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("i")

    def serve(self) -> ForkedWorker | None:
        """Fork workers until the kernel closes the connection or is gone: then return None. In a worker, return it."""
        while True:
            data, fds = self._receive()
            forked: ForkedWorker | None = None
            try:
                if not data or os.getppid() != self._kernel:
                    return None
                message = to_zygote_decoder.decode(data)
                if isinstance(message, PreloadChosen):
                    if not self._preload(message):
                        return None
                    continue
                if not message.imports_late:
                    self._preloader.import_backend(message.backend)
                if (threads := thread_names())[1:]:
                    text = f"{len(threads)} threads ({', '.join(threads)})"
                    self._send(ThreadsLeft(message.number, message.backend, text))
                    return None
                forked = self._fork(message, fds)
                if forked is not None:
                    self._socket.close()
                    return forked
            finally:
                if forked is None:
                    _close(fds)

    def _preload(self, message: PreloadChosen) -> bool:
        """Import what a model has chosen, and respond. Returns whether this process can still fork."""
        try:
            self._preloader.import_chosen(message.modules, message.file)
        except PreloadFailed as error:
            self._send(ForkFailed(0, str(error)))
        except ThreadsStarted as error:
            self._send(ThreadsLeft(0, "", str(error)))
            return False
        else:
            self._send(Preloaded())
        return True

    def _fork(self, request: ForkWorker, fds: list[int]) -> ForkedWorker | None:
        """Fork a worker, close `fds`, and respond. Returns None in the zygote, and what it is in the worker."""
        between = fork_plainly()
        if between < 0:
            code = ctypes.get_errno()
            self._send(ForkFailed(request.number, str(OSError(code, os.strerror(code))), code))
            return None
        if between == 0:
            between = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                os._exit(error.errno or 1)
            if pid == 0:
                return ForkedWorker(request, fds, between, self._preloader.prepared)
            self._worker_pid[0] = pid
            os._exit(0)
        _, status = os.waitpid(between, 0)
        _close(fds)
        if status == 0:
            self._send(Forked(request.number, self._worker_pid[0]))
        else:
            code = os.waitstatus_to_exitcode(status)
            text = os.strerror(code) if code > 0 else f"the process between ended with {code}"
            self._send(ForkFailed(request.number, text, max(code, 0)))
        return None

    def _receive(self) -> tuple[bytes, list[int]]:
        """Return a message and its descriptors; b"" at the end of the connection."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(MAX_MESSAGE, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return b"", []
        return data, descriptors_in(ancillary).tolist()

    def _send(self, message: ZygoteMessage) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next receive finds it, too
            self._socket.send(encode(message))


#: Calls functions without releasing the interpreter's lock.
_libc = ctypes.PyDLL(None, use_errno=True)


def fork_plainly() -> int:
    """Fork as fork(2), for the process between: 0 in that, its process id in the zygote, -1 with an errno on failure.

    `os.fork` prepares a process that goes on: it gives `random` a new state, empties locks, and so on. The process
    between only forks again, and what it would write to are pages that it shares with the zygote.
    """
    pid: int = _libc.fork()
    return pid


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
