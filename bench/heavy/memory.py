"""The memory of a server's processes while a row runs: read from `/proc` again and again by a thread."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path

import msgspec

from bench.machine import children_of

#: The time between two readings of the main process, and how many of them there are for one of the others.
INTERVAL_S, OTHERS_EVERY = 0.01, 5

_FIELD = re.compile(r"^(RssAnon|RssShmem|VmHWM|RssFile):\s+(\d+) kB$", re.MULTILINE)


class ResidentMemory(msgspec.Struct, frozen=True):
    """Resident bytes: of its own, and of shared memory that the process has touched."""

    anonymous: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.anonymous + self.shared


class MemoryGrowth(msgspec.Struct, frozen=True):
    """How much the main process grew at most, and what helpers and workers had at most, in bytes."""

    anonymous: int
    shared: int
    #: Of both together, at the moment where it was largest. Sampling cannot miss it: Linux keeps the largest.
    total: int
    #: The largest memory of all helpers, and of all other children. Shared memory is the main process's, too.
    helpers_anonymous: int
    workers_anonymous: int


def memory_of(pid: int) -> ResidentMemory:
    """Return the memory of a process, nothing if it has ended."""
    fields = _fields(pid)
    return ResidentMemory(fields.get("RssAnon", 0), fields.get("RssShmem", 0))


def _fields(pid: int) -> dict[str, int]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        return {name: int(value) << 10 for name, value in _FIELD.findall(text)}
    return {}


class MemoryWatch:
    """Watches a main process and its children while a `with` block runs; `growth` has the result."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = ResidentMemory()
        self._file = 0
        self._anonymous = self._shared = self._helpers = self._workers = self._total = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch")

    def __enter__(self) -> MemoryWatch:
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # sets VmHWM to what is resident now
        fields = _fields(self._pid)
        self._before = ResidentMemory(fields.get("RssAnon", 0), fields.get("RssShmem", 0))
        self._file = fields.get("RssFile", 0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        fields = _fields(self._pid)
        self._sample_main()
        # Pages of files do not grow in a row; what they grow counts, which is on the safe side.
        self._total = max(self._total, fields.get("VmHWM", 0) - self._file)

    @property
    def growth(self) -> MemoryGrowth:
        before = self._before
        return MemoryGrowth(
            max(0, self._anonymous - before.anonymous),
            max(0, self._shared - before.shared),
            max(0, self._total - before.total),
            self._helpers,
            self._workers,
        )

    def _watch(self) -> None:
        number = 0
        while not self._stop.wait(INTERVAL_S):
            self._sample_main()
            if number % OTHERS_EVERY == 0:
                self._sample_others()
            number += 1

    def _sample_main(self) -> None:
        now = memory_of(self._pid)
        self._anonymous = max(self._anonymous, now.anonymous)
        self._shared = max(self._shared, now.shared)
        self._total = max(self._total, now.total)

    def _sample_others(self) -> None:
        helpers = workers = 0
        for pid in children_of(self._pid):
            if _is_helper(pid):
                helpers += memory_of(pid).anonymous
            else:
                workers += memory_of(pid).anonymous
        self._helpers, self._workers = max(self._helpers, helpers), max(self._workers, workers)


def _is_helper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0--helper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
