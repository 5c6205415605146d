"""The file descriptors of this process."""

from __future__ import annotations

import contextlib
import gc
import os


def open_descriptors() -> set[int]:
    """Return the numbers of all open file descriptors.

    What nothing refers to any more is closed first: the garbage collector could do so between two calls, and a test
    that compares them would see the descriptors of another test go.
    """
    gc.collect()
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it was that of the listing
            os.fstat(fd)
            found.add(fd)
    return found


def descriptors_of(file: os.stat_result) -> int:
    """Return how many open file descriptors refer to a file, those of mappings included."""
    count = 0
    for fd in open_descriptors():
        with contextlib.suppress(OSError):  # a thread has closed it
            count += os.path.samestat(os.fstat(fd), file)
    return count
