"""What a forked process does to become a worker that shares nothing with others but unchanged memory.

What process lists show of a forked worker: the command line that it would have if it had been started by itself.

The system shows the memory that the process was started with (proc_pid_cmdline(5)). A zygote is started with a long
last argument (`ROOM`), so that there is room for the command lines of its workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from backends.transport.zygote_messages import MARK, MARK_OPTION

if TYPE_CHECKING:
    from backends.zygote.zygote import ForkedWorker

#: Fields of /proc/self/stat after the name of the program, counted from 0: where the command line begins and ends.
_ARG_START, _ARG_END = 45, 46


class ProcessTitle:
    """The command line of this process."""

    def __init__(self) -> None:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        self._start, self._end = int(fields[_ARG_START]), int(fields[_ARG_END])

    def set(self, words: list[str]) -> None:
        """Show `words`, cut to the room that there is. Does nothing if the system does not say where the room is."""
        room = self._end - self._start
        if self._start == 0 or room <= 1:
            return
        shown = b"\0".join(word.encode("utf-8", "replace") for word in words)[: room - 1]
        ctypes.memmove(self._start, shown.ljust(room, b"\0"), room)


_ADOPTION_CHECK_S = 0.0001


def become_worker(forked: ForkedWorker, kernel: int, title: ProcessTitle) -> NoReturn:
    """Run the worker, and end the process with it. The process must have been forked by a `Zygote` of `kernel`."""
    from backends.worker.process import run_worker  # imported by the preloader, which takes care of threads

    request = forked.request
    socket_fd, stdout, stderr = forked.fds
    for fd, target in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    # A session of its own: only the kernel gets signals of the terminal, and the worker can be killed together with
    # the processes that its model starts.
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    while os.getppid() == forked.between:  # it ends at once, and the kernel, or init if that is gone, adopts this one
        time.sleep(_ADOPTION_CHECK_S)
    os.environ[MARK] = request.mark
    # The command line that `SpawningLauncher` would give it; the mark is for processes that the model forks.
    words = ["-m", "backends.worker", f"--model={request.title}", f"--kernel={kernel}", f"{MARK_OPTION}{request.mark}"]
    title.set([sys.executable, *words])
    sys.argv = words[1:]
    _seed()
    gc.enable()
    run_worker(
        request.title,
        socket_fd,
        kernel,
        remote=request.remote,
        task_module=request.task_module,
        prepared=forked.prepared,
    )
    # The connection is closed, and the kernel kills the process when it sees that. To end the interpreter until then
    # would write to each page that it shares with the zygote: a fifth of the processor time of a small model's life.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the model may have closed or replaced it
            stream.flush()
    os._exit(0)


def _seed() -> None:
    """Give NumPy's generator of random numbers another state than those of other workers. Python's own has one since
    the fork."""
    legacy = sys.modules.get("numpy.random")
    if legacy is not None:
        legacy.seed()
