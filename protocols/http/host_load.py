"""How busy this machine is, read from /proc: the figures behind nv_cpu_*."""

from __future__ import annotations

from pathlib import Path

import msgspec

_STAT = Path("/proc/stat")
_MEMORY = Path("/proc/meminfo")


class CpuTimes(msgspec.Struct, frozen=True):
    """Ticks of all processors since the machine was started."""

    total: int = 0
    idle: int = 0


class Memory(msgspec.Struct, frozen=True):
    """Bytes of main memory."""

    total: int = 0
    available: int = 0


class HostLoad:
    """Remembers the processors' times, to tell how busy they were since it was last asked."""

    def __init__(self) -> None:
        self._before = parse_cpu_times(_STAT.read_text())

    def utilization(self) -> float:
        """Return the busy share of all processors since the last call or the start, from 0.0 to 1.0."""
        before, self._before = self._before, parse_cpu_times(_STAT.read_text())
        return busy_share(before, self._before)

    def memory(self) -> Memory:
        return parse_memory(_MEMORY.read_text())


def parse_cpu_times(stat: str) -> CpuTimes:
    """Return what the first line of /proc/stat says: user nice system idle iowait irq softirq steal …"""
    ticks = [int(text) for text in stat.partition("\n")[0].split()[1:9]]
    return CpuTimes(sum(ticks), ticks[3] + ticks[4])


def busy_share(before: CpuTimes, after: CpuTimes) -> float:
    total = after.total - before.total
    return 1.0 - (after.idle - before.idle) / total if total > 0 else 0.0


def parse_memory(meminfo: str) -> Memory:
    """Return what /proc/meminfo says, which counts in KiB."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return Memory(_bytes(fields["MemTotal"]), _bytes(fields["MemAvailable"]))


def _bytes(text: str) -> int:
    return int(text.split()[0]) * 1024
