"""File descriptors of this process: raises their limit, and reserves some that clients cannot use.

Clients use descriptors for connections and for regions of shared memory. The reserved ones are for workers, which can
then always be restarted, and for files and arenas.
"""

from __future__ import annotations

import contextlib
import resource

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
