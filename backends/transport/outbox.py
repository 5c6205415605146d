"""What a worker has said and not sent yet, in memory that outlives it: answers leave together, and none is lost.

A send costs more than the small answer in it, so a worker keeps answers of fast executions back until a
few can leave at once. Whoever shares the memory can read them at any time, also when the worker is dead.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: The position in the stream of the first byte that is kept, and how many bytes are kept.
_START = struct.Struct("<Q")
_USED = struct.Struct("<I")
_USED_AT = _START.size
_CONTENT_AT = 16

BYTE_SIZE = 64 * 2**10

#: The reader relies on stores that become visible in their order, as x86 does it.
SHARES_MEMORY = platform.machine() in ("x86_64", "AMD64")


class Outbox:
    """The worker's end. `keep` bytes, `send_by` a socket, and `sent` for what was sent past it. Not thread-safe."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("naiad outbox", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, BYTE_SIZE)
        self._memory = memoryview(mmap.mmap(self.fd, BYTE_SIZE))
        # Each of the two numbers is written by one store.
        self._start_place = self._memory[:_USED_AT].cast("Q")
        self._used_place = self._memory[_USED_AT : _USED_AT + _USED.size].cast("I")
        self._start = 0
        self._used = 0

    def keep(self, data: bytes) -> bool:
        """Keep `data` behind what is kept; False where it does not fit."""
        begin = _CONTENT_AT + self._used
        end = begin + len(data)
        if end > BYTE_SIZE:
            return False
        self._memory[begin:end] = data
        self._used += len(data)
        self._used_place[0] = self._used  # last: the reader takes what this counts
        return True

    def send_by(self, send: Callable[[memoryview], None]) -> None:
        """Have `send` send what is kept, if anything is, and keep it no longer."""
        if self._used:
            send(self._memory[_CONTENT_AT : _CONTENT_AT + self._used])
            self.sent(self._used)

    def sent(self, byte_size: int) -> None:
        """`byte_size` bytes were sent: all that was kept, or others while nothing was."""
        # In this order: a worker that dies between the two has nothing unsent.
        self._used_place[0] = 0
        self._used = 0
        self._start += byte_size
        self._start_place[0] = self._start


class OutboxReader:
    """The kernel's end. Owns its mapping, not the descriptor that it is made of."""

    def __init__(self, fd: int) -> None:
        """Raises ValueError where `fd` is too small to be an outbox."""
        self._memory = memoryview(mmap.mmap(fd, BYTE_SIZE, prot=mmap.PROT_READ))

    def unsent(self, position: int) -> bytes:
        """Return what the worker keeps from `position` in its stream on; empty where that is on its way already."""
        (start,) = _START.unpack_from(self._memory, 0)
        (used,) = _USED.unpack_from(self._memory, _USED_AT)
        skip = position - start
        if not 0 <= skip < used <= BYTE_SIZE - _CONTENT_AT:
            return b""
        found = bytes(self._memory[_CONTENT_AT + skip : _CONTENT_AT + used])
        # Sent while we read, and perhaps overwritten: it comes by the socket.
        return found if _START.unpack_from(self._memory, 0) == (start,) else b""
