"""The memory that the process of a model may use (`naiad.memory_limit`): a cgroup where the server may make one, else
its own memory is looked at.

A cgroup counts all that the process and its children use, and the system ends them when they need more. Where there is
none, the private memory of the worker is looked at twenty times a second: an allocation can exceed the limit for that
long. An address-space limit (RLIMIT_DATA) would also count memory that is reserved and not used, as arenas are.

Whether the system ends processes because memory has run out (OOM killer): an operator sees only SIGKILL else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kernel.machine import memory_kill_count, private_byte_size

if TYPE_CHECKING:
    from collections.abc import Callable


#: How often the memory of a worker without a cgroup is looked at, in seconds.
LOOK_S = 0.05

_numbers = itertools.count(1)


class MemoryLimit(Protocol):
    """The limit of one process."""

    def explanation(self) -> str:
        """Return why the process was ended, with its figures; empty if the limit has not ended it.

        Called when the process has ended.
        """

    def close(self) -> None:
        """The process has ended, and the limit is not needed any more."""


def exceeded(used_byte_size: int, limit_byte_size: int) -> str:
    """Return the text about a process that has used too much. Pure."""
    return (
        f"it used {used_byte_size / 2**20:.0f} MiB of memory, and its model may use {limit_byte_size / 2**20:.0f} MiB "
        "(naiad.memory_limit)"
    )


class Cgroup:
    """A limit that the system enforces. A `MemoryLimit`."""

    def __init__(self, folder: Path, limit_byte_size: int) -> None:
        """`folder` is the cgroup of the process, and nobody else's."""
        self._folder = folder
        self._limit_byte_size = limit_byte_size

    def explanation(self) -> str:
        events = dict(line.split() for line in _read(self._folder / "memory.events").splitlines())
        if events.get("oom_kill", "0") == "0":
            return ""
        peak = _read(self._folder / "memory.peak").strip()
        return exceeded(int(peak) if peak else self._limit_byte_size, self._limit_byte_size)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class WatchedLimit:
    """Looks at the private memory of a process, and kills it above the limit. A `MemoryLimit`."""

    def __init__(self, pid: int, limit_byte_size: int, kill: Callable[[], None]) -> None:
        self._path = f"/proc/{pid}/statm"
        self._limit_byte_size = limit_byte_size
        self._kill = kill
        self._explanation = ""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        used = private_byte_size(_read(Path(self._path)))
        if used > self._limit_byte_size:
            self._explanation = exceeded(used, self._limit_byte_size)
            self._kill()
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def explanation(self) -> str:
        return self._explanation

    def close(self) -> None:
        self._timer.cancel()


def limit_memory(pid: int, limit_byte_size: int, kill: Callable[[], None]) -> MemoryLimit:
    """Limit the memory of a process, in bytes. `kill` ends it. Must be called on the event loop."""
    parent = own_cgroup()
    if parent is not None and (cgroup := make_cgroup(parent, pid, limit_byte_size)) is not None:
        return cgroup
    return WatchedLimit(pid, limit_byte_size, kill)


def own_cgroup() -> Path | None:
    """Return the folder of this process's cgroup, if it has one of the unified hierarchy (version 2)."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::/"):
            folder = Path("/sys/fs/cgroup", line.removeprefix("0::/"))
            return folder if (folder / "cgroup.procs").exists() else None
    return None


def make_cgroup(parent: Path, pid: int, limit_byte_size: int) -> Cgroup | None:
    """Put a process into a cgroup of its own; None where the server may not do that, or memory is not controlled."""
    folder = parent / f"naiad-{os.getpid()}-{next(_numbers)}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        (folder / "memory.max").write_text(str(limit_byte_size))
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    with contextlib.suppress(OSError):  # without swap accounting
        (folder / "memory.swap.max").write_text("0")
    with contextlib.suppress(OSError):
        (folder / "memory.oom.group").write_text("1")
    return Cgroup(folder, limit_byte_size)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


#: A kill explains the ends that are noticed within this time after it, in seconds: several workers may end together.
_EXPLAINS_S = 5.0


class MemoryKills:
    """Counts the system's kills from when it is made."""

    def __init__(self) -> None:
        self._count = memory_kill_count()
        self._noticed_s = float("-inf")

    def explain_kill(self) -> bool:
        """Whether a process that has just ended by SIGKILL was probably killed because memory had run out."""
        now_s, count = time.monotonic(), memory_kill_count()
        if count > self._count:
            self._noticed_s = now_s
        self._count = count
        return now_s - self._noticed_s < _EXPLAINS_S
