"""What a process asks of the system: its end with its parent, its name, its processors, its stacks in the log."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from typing import TYPE_CHECKING

from backends.transport.wire import STACKS_SIGNAL
from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Made once, before workers are forked: what each of them makes is memory of its own.
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when `parent` dies, whatever it does then. Exits if `parent` is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the kernel is gone")


#: How much sooner than its parent a process is ended when memory runs out: as if it had a tenth more of all memory.
_SOONER = 100
_MOST = 1000


def end_sooner_without_memory() -> None:
    """Let the system end this process rather than its parent when memory runs out (proc(5), oom_score_adj).

    Without `open`: its first use in a forked process would take 0.2 MiB of memory of its own.
    """
    with contextlib.suppress(OSError, ValueError):
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        try:
            score = int(os.pread(fd, 16, 0))
            os.pwrite(fd, b"%d" % min(score + _SOONER, _MOST), 0)
        finally:
            os.close(fd)


def write_stacks_when_asked() -> None:
    """Write the stacks of all threads to standard error at `STACKS_SIGNAL`, and when this process crashes.

    The handler is in C: it works while a library holds Python's lock. Without it the signal would end the process.
    """
    faulthandler.enable(sys.__stderr__ or 2)
    faulthandler.register(STACKS_SIGNAL, sys.__stderr__ or 2)


def set_process_name(name: str) -> None:
    """Show the first 15 bytes of `name` as the name of this process (prctl(2)), as far as they are ASCII."""
    _LIBC.prctl(_PR_SET_NAME, name.encode("ascii", "replace")[:15])


def run_on(cpus: Iterable[int]) -> None:
    """Run all threads of this process, present and future, only on `cpus`.

    Raises `InternalError`, with Triton's text, if the machine has none of them.
    """
    wanted = set(cpus)
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, OverflowError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InternalError(f"Unable to set NUMA thread affinity: {reason}") from None
    # Libraries that were imported to complete the configuration may have started threads.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), wanted)
