"""Regions that the kernel attached to this worker, mapped on first use."""

from __future__ import annotations

import contextlib
import mmap
import os

import msgspec

from kernel.errors import InvalidArgument


class _Attached(msgspec.Struct):
    fd: int
    byte_size: int
    offset: int
    foreign: bool
    mapping: mmap.mmap | None = None
    view: memoryview | None = None


class AttachedRegions:
    """Regions by the numbers that the kernel gave them. Owns their descriptors."""

    def __init__(self) -> None:
        self._regions: dict[int, _Attached] = {}

    def attach(self, number: int, fd: int, byte_size: int, offset: int, *, foreign: bool) -> None:
        """Know the region `number`: `byte_size` bytes from `offset` of `fd`, which is ours now."""
        self._regions[number] = _Attached(fd, byte_size, offset, foreign)

    def detach(self, number: int) -> None:
        """Unmap a region; arrays that still point into it keep the mapping alive until they are gone."""
        region = self._regions.pop(number)
        os.close(region.fd)
        if region.view is not None and region.mapping is not None:
            region.view.release()
            with contextlib.suppress(BufferError):
                region.mapping.close()

    def view(self, number: int, offset: int, byte_size: int) -> memoryview:
        """Return writable bytes of a region. Raises `InvalidArgument` where its owner has shortened it."""
        region = self._regions[number]
        if region.view is None:
            region.view = self._map(region)
        assert offset + byte_size <= region.byte_size, f"{byte_size} bytes at {offset} of region {number}"
        return region.view[offset : offset + byte_size]

    def _map(self, region: _Attached) -> memoryview:
        # A mapping starts at a page: map from the start of the file and skip `offset` in the view.
        end = region.offset + region.byte_size
        try:
            region.mapping = mmap.mmap(region.fd, end)
        except ValueError:  # the file is shorter than `end`
            raise InvalidArgument("shared memory region was truncated by its owner") from None
        return memoryview(region.mapping)[region.offset : end]
