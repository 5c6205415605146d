"""The outbox: a worker's unsent messages, in memory that it shares with the kernel (docs/decisions/the-outbox.md).

A send costs more than the small response in it. So a worker collects the responses of fast executions and sends several
at once. The kernel can read the outbox at any time, also when the worker is dead: no response is lost.

The worker also writes there which batch it has begun, which costs a store and no message. So the kernel knows of a lost
worker what its model was given, and of a busy one what it is busy with.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import struct
from typing import TYPE_CHECKING

import msgspec

from shm.region import check_sealed, sealed_memfd

if TYPE_CHECKING:
    from collections.abc import Callable

#: The header: the position in the stream of the first unsent byte, the number of unsent bytes, and the progress.
_START = struct.Struct("<Q")
_USED = struct.Struct("<I")
_PROGRESS = struct.Struct("<Q")
_USED_AT = _START.size
_PROGRESS_AT = 16
_CONTENT_AT = 24

BYTE_SIZE = 64 * 2**10

#: The reader needs stores that become visible in program order, as on x86.
SHARES_MEMORY = platform.machine() in ("x86_64", "AMD64")


class Progress(msgspec.Struct, frozen=True):
    """How far a worker is: the number of the batch that it has begun last, and whether its model got that batch.

    A worker executes batches in the order of their numbers, one at a time. Without a batch the number is 0.
    """

    batch: int
    in_model: bool


#: The progress is one number, so that one store writes it: twice the batch's number, and 1 more when its model has it.
IN_MODEL = 1


class Outbox:
    """The worker's end. `add` collects bytes, `send_with` sends them, `sent` counts sent bytes. Not thread-safe."""

    def __init__(self) -> None:
        self.fd = sealed_memfd("naiad outbox", BYTE_SIZE)
        self._memory = memoryview(mmap.mmap(self.fd, BYTE_SIZE))
        # Each of the two numbers is written by one store.
        self._start_field = self._memory[:_USED_AT].cast("Q")
        self._used_field = self._memory[_USED_AT : _USED_AT + _USED.size].cast("I")
        #: One number, which the worker's main thread writes; see `Progress`.
        self.progress = self._memory[_PROGRESS_AT : _PROGRESS_AT + _PROGRESS.size].cast("Q")
        self._start = 0
        self._used = 0

    def close(self) -> None:
        """Close the descriptor: the connection has ended. The memory stays until nobody refers to it."""
        with contextlib.suppress(OSError):  # a model may have closed it
            os.close(self.fd)

    def add(self, data: bytes) -> bool:
        """Append `data`; returns False if there is no space for it."""
        begin = _CONTENT_AT + self._used
        end = begin + len(data)
        if end > BYTE_SIZE:
            return False
        self._memory[begin:end] = data
        self._used += len(data)
        self._used_field[0] = self._used  # last: the reader takes this number of bytes
        return True

    def send_with(self, send: Callable[[memoryview], None]) -> None:
        """Send the unsent bytes with `send`, if there are any, and clear the outbox."""
        if self._used:
            send(self._memory[_CONTENT_AT : _CONTENT_AT + self._used])
            self.sent(self._used)

    def sent(self, byte_size: int) -> None:
        """Count `byte_size` sent bytes: all bytes of the outbox, or other bytes while the outbox is empty."""
        # In this order: if the worker dies between the two stores, the outbox is empty.
        self._used_field[0] = 0
        self._used = 0
        self._start += byte_size
        self._start_field[0] = self._start


class OutboxReader:
    """The kernel's end. Owns its mapping, not the descriptor."""

    def __init__(self, fd: int) -> None:
        """Raises ValueError unless `fd` is sealed memory of the size of an outbox."""
        check_sealed(fd, BYTE_SIZE)
        self._mapping = mmap.mmap(fd, BYTE_SIZE, prot=mmap.PROT_READ)
        self._memory = memoryview(self._mapping)

    def close(self) -> None:
        """Unmap the memory: the worker is dead, and all that it has left was handled."""
        self._memory.release()
        self._mapping.close()

    def unsent(self, position: int) -> bytes:
        """Return the unsent bytes from `position` of the worker's stream on; empty if the worker has sent that byte."""
        (start,) = _START.unpack_from(self._memory, 0)
        (used,) = _USED.unpack_from(self._memory, _USED_AT)
        skip = position - start
        if not 0 <= skip < used <= BYTE_SIZE - _CONTENT_AT:
            return b""
        found = bytes(self._memory[_CONTENT_AT + skip : _CONTENT_AT + used])
        # If the start has moved, the bytes were sent meanwhile, and perhaps overwritten: the socket delivers them.
        return found if _START.unpack_from(self._memory, 0) == (start,) else b""

    def progress(self) -> Progress:
        """Return how far the worker is. After its death this is final."""
        (number,) = _PROGRESS.unpack_from(self._memory, _PROGRESS_AT)
        return Progress(number >> 1, bool(number & IN_MODEL))
