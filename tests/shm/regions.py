"""Regions over memfds."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from shm.region import FileHandle, Region, RegionKind

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def memfd_region(kind: RegionKind, byte_size: int) -> Iterator[Region]:
    """Drop the region at the end, when no lease of it may be left."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, byte_size)
    made = Region("r", kind, FileHandle(fd), byte_size)
    yield made
    made.drop()
    assert made.closed, "every lease of a test is released"
