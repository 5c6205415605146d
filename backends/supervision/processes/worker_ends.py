"""What connects a worker of this machine with the kernel: a socket, and pipes for what it prints."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from backends.supervision.output.capture import OutputCapture
from backends.supervision.output.worker_output import WorkerOutput
from kernel.loop.clock import LoopClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.supervision.output.limits import OutputLimits


class WorkerEnds:
    """Both ends of what connects a worker with the kernel."""

    def __init__(self, title: str, limits: OutputLimits) -> None:
        """Raises `OSError`; then nothing is open."""
        self.kernel_socket, self.worker_socket = socket.socketpair()
        try:
            self.capture = OutputCapture(WorkerOutput(title, limits, LoopClock()))
        except BaseException:
            self.kernel_socket.close()
            self.worker_socket.close()
            raise

    @property
    def worker_fds(self) -> list[int]:
        """The worker's ends: of the socket, of its standard output, of its standard error."""
        return [self.worker_socket.fileno(), self.capture.stdout_fd, self.capture.stderr_fd]


@contextlib.contextmanager
def worker_ends(title: str, limits: OutputLimits) -> Iterator[WorkerEnds]:
    """Open the ends of a worker, whose output is logged under `title`. Raises `OSError`.

    After the block the worker's ends are closed here. The kernel's ends are too if the block raises; else they are the
    caller's.
    """
    ends = WorkerEnds(title, limits)
    try:
        yield ends
    except BaseException:
        ends.kernel_socket.close()
        ends.capture.close()
        raise
    finally:
        ends.worker_socket.close()
        ends.capture.close_child_ends()
