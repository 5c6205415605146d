"""Starts the process of a zygote. Needs no event loop, and imports little.

The imports of a zygote take longer than any other part of the start. So `kernel/start.py` starts the first zygote
before it imports the server; `ZygoteProcess` takes it over.
"""

from __future__ import annotations

import os
import socket
import subprocess

from backends.launch.pipes import OutputPipes
from backends.transport.zygote_messages import ROOM
from kernel.machine import own_command

#: What a zygote runs; tests replace it.
ZYGOTE_MODULE = "backends.zygote"


class StartedZygote:
    """A started zygote without a `ZygoteProcess` yet. The owner calls `take` or `end`."""

    def __init__(self) -> None:
        """Start the process, in a session of its own. Raises `OSError`; then there is none, and nothing is open.

        Call it in the main thread: the process ends with the thread that has started it.
        """
        self.pipes = OutputPipes()
        try:
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.process = _spawn(theirs.fileno(), self.pipes)
            except BaseException:
                self.socket.close()
                raise
            finally:
                theirs.close()
        except BaseException:
            self.pipes.close_own_ends()
            raise
        finally:
            self.pipes.close_child_ends()
        self._owned = True

    def take(self) -> None:
        """The process, the socket and the pipes are the caller's from now on."""
        self._owned = False

    def end(self) -> None:
        """Kill the process, wait for its end, and close everything, unless it was taken."""
        if self._owned:
            self._owned = False
            self.process.kill()
            self.process.wait()
            self.socket.close()
            self.pipes.close_own_ends()


def _spawn(fd: int, pipes: OutputPipes) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*own_command(ZYGOTE_MODULE), str(fd), str(os.getpid()), ROOM],
        stdin=subprocess.DEVNULL,
        stdout=pipes.stdout_fd,
        stderr=pipes.stderr_fd,
        pass_fds=[fd],
        start_new_session=True,
    )
