"""Waits for a process as long as it works, because on a busy or swapping machine a start can take very long.

How much processor time a process needs is what it has used, and how long it has waited for a processor. A child that a
signal has stopped does not work.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


def is_stopped(pidfd: int) -> bool:
    """Whether a child of this process is stopped (SIGSTOP). A process that a debugger holds does not count.

    One system call, which leaves the report for the next call (waitid(2)).
    """
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is not None


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


#: How often a process is checked, in seconds.
LOOK_S = 1.0


class WorkWatch:
    """Decides when a process makes no progress. Pure.

    At each look it is given a mark, such as `processor_demand.work_mark`: an equal one says that nothing was done.
    """

    def __init__(self, limit_ns: int, now_ns: int) -> None:
        """The process makes no progress when its mark has not changed for `limit_ns`."""
        self._limit_ns = limit_ns
        self._changed_ns = now_ns
        self._mark: Hashable = None

    def stands_still(self, now_ns: int, mark: Hashable) -> bool:
        """Note `mark`, as it is at `now_ns`. Without any, None, the limit holds for the whole time."""
        if mark != self._mark:
            self._mark, self._changed_ns = mark, now_ns
        return now_ns - self._changed_ns >= self._limit_ns


async def done_while_working(
    future: asyncio.Future[Any],
    mark: Callable[[], Hashable],
    limit_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait for `future`, which is not cancelled; returns False if the process did nothing for `limit_s` seconds before.

    `mark` returns the mark of the process that will set the future. A process that is `stopped` by a signal at two
    looks in a row does nothing either.
    """
    watch, was_stopped = WorkWatch(round(limit_s * 1e9), time.monotonic_ns()), False
    while not future.done():
        await asyncio.wait([future], timeout=min(LOOK_S, limit_s))
        if future.done():
            break
        is_stopped = stopped()
        if watch.stands_still(time.monotonic_ns(), mark()) or (is_stopped and was_stopped):
            return False
        was_stopped = is_stopped
    return True
