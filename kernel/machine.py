"""What this process may use of its machine: processors, memory, file descriptors.

Processors and memory are counted within the limits of its control groups. Also here: how the process gives memory back
that it does not use, what private memory others have, and how it starts a process of its interpreter.

Clients use descriptors for connections and for regions of shared memory. So the limit is raised, and some are reserved
for workers, which can then always be restarted, and for files and arenas.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path

from kernel.naiad_module import RUN_MODULE, is_shadowed

GROUPS_FOLDER = Path("/sys/fs/cgroup")

OWN_GROUPS = Path("/proc/self/cgroup")

MEMORY_FILES = Path("/proc/meminfo")

MACHINE_EVENTS = Path("/proc/vmstat")

_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -8, -1, -3  # malloc.h of the GNU C library

#: Up to which size of a block freed memory is kept, and how much of it at most, in bytes.
_KEPT_BLOCK, _MOST_KEPT = 2 << 20, 32 << 20

#: The folder of our packages.
_OUR_FOLDER = os.path.realpath(Path(__file__).parents[1])


def processor_count() -> int:
    """Return the number of whole processors, at least 1: the CPU affinity, or less if there is a quota."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, int(min([allowed, *map(_quota, _files("cpu.max"))])))


def limited_processor_count() -> int:
    """Return the number of processors that a host policy or a container allows; 0 if this process may use all.

    By default, frameworks start a thread for each core of the machine.
    """
    allowed = processor_count()
    return allowed if allowed < (os.cpu_count() or 1) else 0


def give_memory_back() -> None:
    """Give freed memory back to the system (malloc_trim(3)), if the C library can do that.

    Takes about 0.1 ms per MiB. Other Python threads run meanwhile, until they need new memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def share_malloc_arena() -> None:
    """Let all threads take memory from one heap (mallopt(3), M_ARENA_MAX), if the C library has others.

    Otherwise imports in a thread create a second heap, and each heap keeps unused memory: 0.4 MiB in a kernel that has
    just started. Threads then wait for each other in malloc, but hardly, because of the interpreter's lock.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for the next blocks (mallopt(3)), if the C library can do that.

    For processes that send or receive large tensors in chunks: malloc would return the memory of each chunk to the
    system, which then clears every page of the next one. Three quarters of the time for a chunk were that.
    `give_memory_back` still works.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def helper_count() -> int:
    """Return how many helpers a server may have: at least two, since one is kept free for small tasks."""
    return max(2, min(4, processor_count() // 2))


def memory_byte_size() -> int:
    """Return the bytes of memory: the machine's, or less if there is a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min([machine, *map(_memory_limit, _files("memory.max"))]))


def available_memory_byte_size() -> int:
    """Return the bytes of memory that processes can still get, within the limits of the control groups.

    Memory that the system can take back (unused pages of files) is available.
    """
    found = [memory_byte_size(), *map(_unused_memory, _files("memory.max"))]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = MEMORY_FILES.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    return max(0, int(min(found)))


def private_byte_size(statm: str) -> int:
    """Return the memory of a process that is neither of files nor shared, by its /proc/PID/statm; 0 for an empty text.

    The file counts in pages: size resident shared and so on.
    """
    fields = statm.split()
    return max(int(fields[1]) - int(fields[2]), 0) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 2 else 0


def memory_kill_count() -> int:
    """Return how many processes the system has ended because memory had run out: those of this process' control group,
    or of the machine where that is not known."""
    for file in (*_files("memory.events")[:1], MACHINE_EVENTS):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def _files(name: str) -> list[Path]:
    """Return the files `name` of this process' control group (version 2) and of all visible groups above it."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = GROUPS_FOLDER / own
    return [folder / name for folder in (group, *group.parents) if folder.is_relative_to(GROUPS_FOLDER)]


def _quota(file: Path) -> float:
    """Return the processors that `file` allows: "QUOTA PERIOD" in microseconds, or "max PERIOD" for no limit."""
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


def _unused_memory(file: Path) -> float:
    """Return the bytes that the control group of `file` may still use."""
    try:
        used = int((file.parent / "memory.current").read_text())
        statistics = dict(line.split() for line in (file.parent / "memory.stat").read_text().splitlines())
        return _memory_limit(file) - used + int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):
        return float("inf")


def _memory_limit(file: Path) -> float:
    """Return the bytes that `file` allows, or "max" for no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return float("inf")


def own_command(module: str) -> list[str]:
    """Return the command for `module`.

    `-m` puts the current folder before all others, and a user may have a module `kernel` there: `-P` keeps the folder
    out. Our own folder stays: there the server runs without being installed. If a folder of PYTHONPATH has such a
    module, a program of `naiad` finds ours beside it.
    """
    try:
        own = os.path.realpath(os.getcwd()) == _OUR_FOLDER
    except FileNotFoundError:  # the folder was removed
        own = False
    if is_shadowed():
        return [sys.executable, "-P", RUN_MODULE, module]
    return [sys.executable, *([] if own else ["-P"]), "-m", module]


#: More are not asked for: no server needs them, and some programs that models start close all that there could be.
_MOST = 1 << 20

#: The most descriptors that are kept from clients. A worker takes about six in this process.
_MOST_RESERVED = 1024


def raise_descriptor_limit() -> None:
    """Raise the limit of this process and those that it starts as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the limit of the machine has changed since
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_reserved(fd: int) -> bool:
    """Whether a client that has just taken the descriptor `fd` must give it back.

    The system always gives the lowest free number, so a high number means that few are left.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and fd >= limit - reserved_count(limit)


def reserved_count(limit: int) -> int:
    """Return how many of `limit` descriptors are kept from clients: an eighth, and of few a larger part."""
    return min(_MOST_RESERVED, max(limit // 8, min(64, limit // 2)))
