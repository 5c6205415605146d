"""The settings of a measurement (machine, versions, commit), and the CPU time and memory of processes.

Every result file begins with `Machine`, and every picture shows it in one line. Memory is counted as the system counts
it (`/proc/PID/smaps_rollup`).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

PACKAGES = ("aiohttp", "grpclib", "hpack", "msgspec", "numpy", "onnxruntime", "protobuf", "uvloop")

TRITON = "2.51.0"

PERF_ANALYZER = "2.41"

#: A machine with more processors in use before the start is busy with other things.
BUSY = 1.0

#: How long the load of the machine is measured. The system's load average would still contain the last measurement.
_LOAD_INTERVAL_S = 1.0


class Machine(msgspec.Struct, frozen=True):
    """The machine and the versions of a measurement. `load` is how many processors were in use before it."""

    date: str
    commit: str
    processor: str
    cores: int
    memory_gib: int
    kernel: str
    python: str
    packages: dict[str, str]
    load: float

    @property
    def line(self) -> str:
        """A short description for the line under a picture."""
        commit = [f"commit {self.commit}"] if self.commit else []
        busy = [f"busy with other things ({self.load} processors in use)"] if self.load > BUSY else []
        cores = f"{self.cores} cores ({self.processor})"
        return ", ".join([cores, f"Python {self.python}", *commit, self.date, *busy])


def this_machine() -> Machine:
    """Describe the machine as it is now. Call this before the load begins."""
    return Machine(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=_commit(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        kernel=platform.release(),
        python=platform.python_version(),
        packages={name: each for name in PACKAGES if (each := _version(name))},
        load=_processors_in_use(),
    )


def _processors_in_use() -> float:
    before = idle_seconds()
    time.sleep(_LOAD_INTERVAL_S)
    idle = (idle_seconds() - before) / _LOAD_INTERVAL_S
    return round(max(0.0, (os.cpu_count() or 1) - idle), 2)


def idle_seconds() -> float:
    """Return the idle time of all processors since the machine was started, added up."""
    return float(Path("/proc/uptime").read_text().split()[1])


def _commit() -> str:
    """Return the commit that is measured, with a plus sign if files were changed since."""
    command = ["git", "describe", "--always", "--dirty=+"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].replace("(R)", "").replace("(TM)", "").split())
    return platform.machine()


def _version(package: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return ""


def children_of(pid: int) -> list[int]:
    """Return the process ids of all living descendants of `pid`."""
    found: list[int] = []
    pending = [pid]
    while pending:
        each = pending.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{each}/task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                pending += children
    return found


class ProcessTimes(msgspec.Struct, frozen=True):
    """CPU seconds that processes have used so far, in steps of 10 ms: in user mode and in the system."""

    user_s: float = 0.0
    system_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.user_s + self.system_s

    def __add__(self, other: ProcessTimes) -> ProcessTimes:
        return ProcessTimes(self.user_s + other.user_s, self.system_s + other.system_s)

    def __sub__(self, other: ProcessTimes) -> ProcessTimes:
        return ProcessTimes(self.user_s - other.user_s, self.system_s - other.system_s)


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name of the program; none for a process that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def cpu_times_of(pid: int) -> ProcessTimes:
    """Return what one process has used; zero for a process that has ended."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return ProcessTimes(*(int(ticks) / ticks_per_s for ticks in stat_fields(pid)[11:13]))


def cpu_times(pid: int) -> ProcessTimes:
    """Return what a process and its living descendants have used."""
    return sum(map(cpu_times_of, [pid, *children_of(pid)]), ProcessTimes())


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
