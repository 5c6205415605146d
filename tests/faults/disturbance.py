"""How much the machine is disturbed while a row is measured.

`python -m tests.faults.disturbance` only sleeps. It is due every five milliseconds, and counts how late it was woken. A
wait of a client that is no longer than this is no wait for the server. The process prints the longest one, in
milliseconds, for each line that it reads.

A process that computes waits longer than one that sleeps if other programs compute, too. So the processor time that
was spent on anything but the row is counted as well.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.heavy.measurement import LineProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERVAL_S = 0.005

#: A row that fails beside more than this is measured again: half of the time that others may wait, and a tenth of a
#: processor.
STALL_LIMIT_MS, OTHERS_LIMIT = 25.0, 0.1


class Disturbance(msgspec.Struct, frozen=True):
    """What disturbed a row."""

    #: How late the machine woke a process that only sleeps, at most.
    stall_ms: float
    #: Processors that others than the row's processes had, on the average: 0.5 is half of one.
    others: float

    @property
    def excuses(self) -> bool:
        """Whether a failure may come from it."""
        return self.stall_ms > STALL_LIMIT_MS or self.others > OTHERS_LIMIT


class DisturbanceWatch:
    """What `watched` yields."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process
        self._before = self._times()

    def seen(self) -> Disturbance:
        """Return what there was since the last call. The row's processes have ended: only then their time is known."""
        self._process.say()
        stall_ms = float(self._process.line())
        before, self._before = self._before, self._times()
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._before, before, strict=True))
        return Disturbance(stall_ms, max(0.0, busy_s - own_s) / max(wall_s, 1e-3))

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """Return the wall time, and the processor time of the machine and of this process with its ended children."""
        users = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
        own_s = sum(each.ru_utime + each.ru_stime for each in users)
        return time.monotonic(), busy_time_s(Path("/proc/stat").read_text()), own_s


def busy_time_s(stat: str) -> float:
    """Return the processor time of everything, also what other machines on the same hardware took: all but idle and
    waiting for disks, in the text of `/proc/stat` (proc(5))."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def watched() -> Iterator[DisturbanceWatch]:
    """Measure while the block runs."""
    process = LineProcess("tests.faults.disturbance")
    try:
        watch = DisturbanceWatch(process)
        watch.seen()  # the start of the process counts in no row
        yield watch
    finally:
        process.close()


def main() -> None:
    longest_s, due = 0.0, time.perf_counter()
    while True:
        due = max(due + INTERVAL_S, time.perf_counter())
        readable, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))
        longest_s = max(longest_s, time.perf_counter() - due)
        if readable:
            if not sys.stdin.readline():
                return
            print(f"{longest_s * 1e3:.2f}", flush=True)
            longest_s = 0.0


if __name__ == "__main__":
    main()
