"""The memory of processes, as the system counts it (`/proc/PID/smaps_rollup`)."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

_LINE = re.compile(r"^(Rss|Pss|Private_Clean|Private_Dirty|Private_Hugetlb):\s+(\d+) kB$", re.MULTILINE)


class ProcessMemory(msgspec.Struct, frozen=True):
    """What a process takes, in bytes.

    `resident` counts every page that it has. `proportional` counts a page that n processes share as a part of n; the
    sum over all processes is the memory that they take together. `private` are the pages that no other process has:
    what one process more or less changes.
    """

    resident: int = 0
    proportional: int = 0
    private: int = 0

    def __add__(self, other: ProcessMemory) -> ProcessMemory:
        return ProcessMemory(
            self.resident + other.resident, self.proportional + other.proportional, self.private + other.private
        )


def memory_of(pid: int) -> ProcessMemory:
    """Return the memory of a process. Raises `OSError` if there is no such process, or it is another user's."""
    return parse_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())


def parse_rollup(text: str) -> ProcessMemory:
    """Return what a `smaps_rollup` file says. A process that has ended has an empty one."""
    found = {name: int(size) << 10 for name, size in _LINE.findall(text)}
    private = sum(size for name, size in found.items() if name.startswith("Private"))
    return ProcessMemory(found.get("Rss", 0), found.get("Pss", 0), private)
