"""The file descriptors of this process."""

from __future__ import annotations

import contextlib
import os


def open_descriptors() -> set[int]:
    """Return the numbers of all open file descriptors.

    Compare two results by `<=`: what earlier tests have left may be closed at any time.
    """
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
