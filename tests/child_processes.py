"""The processes that a process has started."""

from __future__ import annotations

import contextlib

import psutil


def children_with(words: str, pid: int | None = None) -> list[int]:
    """Return the children of a process, of this one if none is given, that have these words in their command line.

    Processes and threads that end meanwhile are left out.
    """
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if words in " ".join(child.cmdline()):
                found.append(child.pid)
    return found
