"""Processor time and memory of worker processes, as the system has them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from protocols.http.metrics.memory_families import private_byte_size

if TYPE_CHECKING:
    from collections.abc import Iterable

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessUse(msgspec.Struct, frozen=True):
    """What one process uses."""

    #: Processor time since its start.
    cpu_s: float
    #: Memory that is neither of files nor shared.
    byte_size: int


class ProcessLoads:
    """Looks at processes from time to time, and knows how busy they were between two looks."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, ProcessUse]] = {}
        #: By process id: processors that it kept busy (1.0 is one), None after the first look; and bytes of memory.
        self.found: dict[int, tuple[float | None, int]] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Read the figures of these processes. Blocks for some 50 µs per process: call it in a thread."""
        before, self._before = self._before, {}
        found: dict[int, tuple[float | None, int]] = {}
        for pid in pids:
            now_ns = time.monotonic_ns()
            use = read_process(pid)
            if use is None:
                continue
            self._before[pid] = (now_ns, use)
            earlier = before.get(pid)
            busy = None
            if earlier is not None and now_ns > earlier[0]:
                busy = round(max(use.cpu_s - earlier[1].cpu_s, 0.0) / ((now_ns - earlier[0]) / 1e9), 3)
            found[pid] = (busy, use.byte_size)
        self.found = found


def read_process(pid: int) -> ProcessUse | None:
    """Return what a process uses, None if it has ended. Blocks."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        statm = Path(f"/proc/{pid}/statm").read_text()
        return ProcessUse(cpu_seconds(stat), private_byte_size(statm))
    except (OSError, ValueError, IndexError):
        return None


def cpu_seconds(stat: str) -> float:
    """Return utime and stime of /proc/PID/stat; the name of the process, in parentheses, may contain anything."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
