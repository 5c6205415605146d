"""How much processor time a process needs: what it has used, and how long it has waited for a processor. And whether it
does any work.
"""

from __future__ import annotations

import time
from pathlib import Path

#: `CPUCLOCK_SCHED` of Linux: the clock that counts the processor time of all threads of a process, in nanoseconds.
_CPUCLOCK_SCHED = 2


def work_mark(pid: int) -> tuple[int, str] | None:
    """Return a value that changes while a process works; None if it has ended.

    It is the processor time, and how often the main thread was given a processor: one that waits for pages of a disk
    uses hardly any time, but gets a processor for each.
    """
    try:
        used = time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return None
    try:
        times = Path(f"/proc/{pid}/schedstat").read_text().split()[2]
    except (OSError, IndexError):
        times = ""
    return used, times


def demanded_ns(pid: int) -> int | None:
    """Return the processor time of a process and how long its main thread has waited for a processor; None if it ended.

    On a busy machine a process that works gets little time, but then it waits for a processor, and not for anything
    else. A kernel of Linux that does not count this wait has only the time.
    """
    try:
        used = time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)  # clock_getcpuclockid(3), without a call for it
    except OSError:
        return None
    try:
        waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        waited = 0
    return used + waited
