"""Imports what workers need, once, before they are forked.

Only the thread that forks is in the new process, so after each import the zygote must have one thread. OpenBLAS starts
its threads when it is loaded, ends them before a fork, and starts them again when a process first needs them. So an
extra fork ends them here (`_end_threads`). ONNX Runtime starts one for its telemetry, unless ORT_DISABLE_TELEMETRY is
set (`backends/worker/process.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
from typing import TYPE_CHECKING

from backends.registry import BUILT_IN
from backends.worker.preloading import run_chosen

if TYPE_CHECKING:
    from backends.worker.process import PreparedWorker


class ThreadsStarted(Exception):
    """What a model has chosen is imported, and this process must not fork any more. The message names the threads.

    A library that has computed leaves threads, too: the team of OpenMP, for which a fork would wait without an end.
    """


class Preloader:
    """What this process has imported."""

    def __init__(self) -> None:
        """Import what all workers need."""
        self._backends: set[str] = set()
        process = importlib.import_module("backends.worker.process")
        process.prepare_process()
        #: What each fork with a model becomes.
        self.prepared: PreparedWorker = process.PreparedWorker()
        _imported()

    def import_backend(self, name: str) -> None:
        """Import a built-in backend, once. Others are imported by the worker, because it is not known what they do at
        import.

        An error is the worker's: it imports the backend again, and responds with the error.
        """
        if name in self._backends or name not in BUILT_IN:
            return
        self._backends.add(name)
        with contextlib.suppress(Exception):
            module = BUILT_IN[name].partition(":")[0]
            importlib.import_module(module)
            importlib.import_module("backends.zygote.rehearsal").rehearse(module)
        _imported()

    def import_chosen(self, modules: tuple[str, ...], file: str) -> None:
        """Import modules that a model has chosen, and run its file.

        Raises `PreloadFailed`, and `ThreadsStarted`.
        """
        run_chosen(modules, file)
        gc.collect()  # unlike our modules, these may leave much
        _imported()
        if (threads := thread_names())[1:]:
            raise ThreadsStarted(f"{len(threads)} threads ({', '.join(threads)})")


def thread_names() -> list[str]:
    """Return the names of the threads of this process.

    Without `open`: what the zygote writes to between two forks is memory that workers do not share.
    """
    return [_thread_name(task) for task in os.listdir("/proc/self/task")]


def _thread_name(task: str) -> str:
    fd = os.open(f"/proc/self/task/{task}/comm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 100).decode(errors="replace").strip()
    finally:
        os.close(fd)


def _imported() -> None:
    """Prepare this process for forks after an import."""
    # What was printed and not written yet would be written by each fork.
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    if thread_names()[1:]:
        _end_threads()
    # Garbage collections in workers then leave the pages of these objects shared. Nothing is collected before: to find
    # the few hundred objects of garbage among the others takes 16 ms, for which the first worker would wait.
    gc.freeze()
    # With everything frozen a collection takes no time, and empties the interpreter's lists of freed objects. Else the
    # first collection in each worker does that, and writes to 0.25 MiB of pages that are shared.
    gc.collect()


def _end_threads() -> None:
    """Let libraries end threads that they end before a fork (pthread_atfork(3)), and start again when they need them.

    This process has used none of them, so none holds anything.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
