"""What /proc says of the machine (the figures behind nv_cpu_*), and of worker processes: processor time and memory."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.machine import private_byte_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.model_figures import ModelFigures

STAT_FILE = Path("/proc/stat")

_MEMORY = Path("/proc/meminfo")


class HostTimes(msgspec.Struct, frozen=True):
    """Ticks of all processors since the machine was started."""

    total: int = 0
    idle: int = 0


class Memory(msgspec.Struct, frozen=True):
    """Bytes of main memory."""

    total: int = 0
    available: int = 0


class HostLoad:
    """Measures how busy the processors were between two readings of their times.

    A reading is made on demand, at most once per interval. Callers that come shortly after one another get the same
    value, and none of them shortens the time over which the value of another is a mean.
    """

    def __init__(self, interval_ms: int, now_ns: int) -> None:
        self._interval_ns = interval_ms * 1_000_000
        self._looked_ns = now_ns
        self._before = parse_cpu_times(STAT_FILE.read_text())
        self._utilization = 0.0

    def utilization(self, now_ns: int) -> float:
        """Return the busy share of all processors, from 0.0 to 1.0."""
        if now_ns - self._looked_ns >= self._interval_ns:
            self._looked_ns = now_ns
            before, self._before = self._before, parse_cpu_times(STAT_FILE.read_text())
            self._utilization = busy_share(before, self._before)
        return self._utilization

    def memory(self) -> Memory:
        return parse_memory(_MEMORY.read_text())


def parse_cpu_times(stat: str) -> HostTimes:
    """Return what the first line of /proc/stat says: user nice system idle iowait irq softirq steal …"""
    ticks = [int(text) for text in stat.partition("\n")[0].split()[1:9]]
    return HostTimes(sum(ticks), ticks[3] + ticks[4])


def busy_share(before: HostTimes, after: HostTimes) -> float:
    """Return the share from 0.0 to 1.0, also where the system has corrected its idle time downwards."""
    total = after.total - before.total
    return min(max(1.0 - (after.idle - before.idle) / total, 0.0), 1.0) if total > 0 else 0.0


def parse_memory(meminfo: str) -> Memory:
    """Return what /proc/meminfo says, which counts in KiB."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return Memory(_bytes(fields["MemTotal"]), _bytes(fields["MemAvailable"]))


def _bytes(text: str) -> int:
    return int(text.split()[0]) * 1024


# ---- processes -------------------------------------------------------------------------------


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


class WorkerMemoryReader:
    """What memory worker processes use, as it was when `refresh` was called last.

    The system is asked in a thread, at most once per interval: with many workers it takes milliseconds.
    """

    def __init__(self, interval_ms: int) -> None:
        self._interval_ns = interval_ms * 1_000_000
        self._read_ns = 0
        #: Process id → bytes that are neither of files nor shared memory.
        self.byte_sizes: dict[int, int] = {}

    async def refresh(self, models: Iterable[ModelFigures], now_ns: int) -> None:
        """Ask the system, unless the interval has not passed and no worker is new."""
        pids = {pid for model in models for pid in model.statistics.memory.pids.values()}
        if now_ns - self._read_ns < self._interval_ns and pids <= self.byte_sizes.keys():
            return
        self._read_ns = now_ns
        self.byte_sizes = await asyncio.to_thread(_private_byte_sizes, pids)


def _private_byte_sizes(pids: Iterable[int]) -> dict[int, int]:
    """Return the bytes of anonymous memory of each process; 0 for one that has ended."""
    found = {}
    for pid in pids:
        try:
            found[pid] = private_byte_size(Path(f"/proc/{pid}/statm").read_text())
        except OSError:
            found[pid] = 0
    return found
