"""Reads and writes spans of client regions, in a helper, because the kernel never accesses client memory.

Uses pread and pwrite: a region that its owner has shortened causes an error, not a signal. Memory of CUDA devices is
copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from backends.transport import wire
from kernel.errors import ServingError
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.worker.memory import AttachedRegions
    from backends.worker.output_memory import OutputMemory
    from shm.tensor import Buffer, Span


class CopyableRegion(Protocol):
    """A region whose bytes can be copied without mapping: `AttachedRegion` and `DeviceRegion`."""

    def view(self, offset: int, byte_size: int) -> memoryview:
        """See `WorkerRegion.view`."""

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes at `offset`. Raises `ServingError`."""

    def write_from(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`. Raises `ServingError`."""


class RegionIo:
    """Reads and writes on behalf of the kernel, one task after the other."""

    def __init__(self, regions: AttachedRegions, memory: OutputMemory, send: Callable[[wire.ToKernel], None]) -> None:
        """`read` puts the bytes into `memory`, from which the kernel takes them."""
        self._regions = regions
        self._memory = memory
        self._send = send

    def read(self, message: wire.ReadSpan) -> None:
        """Read a span and send `SpanRead`."""
        span = message.span
        try:
            place, view = self._memory.take(span.byte_size)
        except ServingError as error:
            self._send(wire.SpanRead(message.task, error_text=error.message))
            return
        try:
            self._region(span).read_into(span.offset, view)
        except ServingError as error:
            self._memory.drop(place)
            self._send(wire.SpanRead(message.task, error_text=error.message))
            return
        self._send(wire.SpanRead(message.task, Tensor("", "UINT8", [span.byte_size], None, place)))

    def write(self, message: wire.WriteSpan) -> None:
        """Write a span and send `SpanWritten`."""
        source, target = message.source, message.target
        try:
            data = self._region(source).view(source.offset, source.byte_size)
            self._region(target).write_from(target.offset, data)
        except ServingError as error:
            self._send(wire.SpanWritten(message.task, error.message))
            return
        self._send(wire.SpanWritten(message.task))

    def _region(self, span: Span) -> CopyableRegion:
        # Helpers share memory with the kernel: no region of theirs was transferred.
        return cast("CopyableRegion", self._regions.get(span.lease.region_number))
