"""Regions of a worker that a test makes."""

from __future__ import annotations

import os

from backends.worker.memory import AttachedRegion


def attached_region(
    data: bytes, *, offset: int = 0, writable: bool = True, volatile: bool = False, byte_size: int | None = None
) -> AttachedRegion:
    """Return a region over a new memfd that holds `offset` zeros and then `data`; by default an arena of the kernel."""
    fd = os.memfd_create("test")
    os.pwrite(fd, data, offset)
    size = len(data) if byte_size is None else byte_size
    return AttachedRegion(fd, size, offset, writable=writable, volatile=volatile)
