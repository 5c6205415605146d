"""How busy this machine is, read from /proc: the figures behind nv_cpu_*."""

from __future__ import annotations

from pathlib import Path

import msgspec

_STAT = Path("/proc/stat")
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
        self._before = parse_cpu_times(_STAT.read_text())
        self._utilization = 0.0

    def utilization(self, now_ns: int) -> float:
        """Return the busy share of all processors, from 0.0 to 1.0."""
        if now_ns - self._looked_ns >= self._interval_ns:
            self._looked_ns = now_ns
            before, self._before = self._before, parse_cpu_times(_STAT.read_text())
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
