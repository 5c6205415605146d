"""Messages of gRPC out of the bytes of a call: a flag, a length, and so many bytes. Pure.

Large messages are received into memory of their announced size, whose pages cost nothing until bytes
come. Compressed ones are inflated, to a limit.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from grpclib.const import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.tensor import Buffer

#: The largest message of gRPC's own limit (INT32_MAX).
MAX_MESSAGE_BYTE_SIZE = 2**31 - 1

#: The largest message that a compressed one may become: what HTTP takes as well.
MAX_INFLATED_BYTE_SIZE = 64 * 2**20

#: From here on a message gets memory of its own before it has come.
LARGE_BYTE_SIZE = 64 * 2**10

#: How much of such a message is looked at to find its place, and how much is gathered until there is one.
HEAD_BYTE_SIZE = 1024
_MAX_GATHERED_BYTE_SIZE = 256 * 2**10

#: Compressions of messages that are understood, for `grpc-accept-encoding`, and zlib's name for them.
ACCEPTED_ENCODINGS = ("identity", "deflate", "gzip")
_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}

PREFIX = struct.Struct(">BL")
_PREFIX_BYTE_SIZE = PREFIX.size


class MessageFault(msgspec.Struct, frozen=True):
    """What is wrong with the messages of a call, as the client is told."""

    status: Status
    text: str


class MessageReader:
    """Finds the messages of one call. After a fault it takes no more."""

    __slots__ = ("_compressed", "_encoding", "_filled", "_gathered", "_large", "_length", "fault", "messages", "place")

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        #: Bytes of a prefix, or of a small message, that are not complete.
        self._gathered = bytearray()
        #: Length of the message that is being received, -1 between messages.
        self._length = -1
        self._compressed = False
        self._large: memoryview | None = None
        self._filled = 0
        #: Messages that are complete and nobody has taken.
        self.messages: deque[Buffer] = deque()
        self.fault: MessageFault | None = None
        #: Gives memory for a large message by its first bytes and its length, or None for any.
        self.place: Callable[[bytes, int], memoryview | None] | None = None

    @property
    def between_messages(self) -> bool:
        """Whether the next byte begins a message."""
        return self._length < 0 and not self._gathered and self.fault is None

    def feed(self, data: memoryview) -> None:
        """Take the next bytes of the call."""
        size = len(data)
        if (
            self._length < 0
            and not self._gathered
            and size >= _PREFIX_BYTE_SIZE
            and PREFIX.unpack_from(data) == (0, size - _PREFIX_BYTE_SIZE)
            and size < LARGE_BYTE_SIZE
            and self.fault is None
        ):
            self.messages.append(bytes(data[_PREFIX_BYTE_SIZE:]))  # usual: a whole message
            return
        position = 0
        while self.fault is None and position < size:
            if self._length < 0:
                position += self._take_prefix(data[position:])
            else:
                position += self._take_content(data[position:])

    def begin_large(self, head: bytes, byte_size: int) -> None:
        """Take the first bytes of a large message that is not compressed; more come to where `direct` says."""
        self._gathered += head
        self._compressed, self._length, self._filled = False, byte_size, 0

    def end(self) -> None:
        """The client has sent its last byte."""
        if self.fault is None and (self._length >= 0 or self._gathered):
            self.fault = MessageFault(Status.INTERNAL, "Unable to parse request: the message is incomplete")

    def direct(self) -> memoryview | None:
        """Return where the next bytes of a large message belong, None where there is none."""
        if self._large is None and self._length >= LARGE_BYTE_SIZE and len(self._gathered) >= HEAD_BYTE_SIZE:
            self._allocate()
        return None if self._large is None else self._large[self._filled :]

    def filled(self, byte_size: int) -> None:
        """So many bytes were written to what `direct` returned."""
        self._filled += byte_size
        if self._filled == self._length:
            assert self._large is not None
            self._complete(self._large)

    def _take_prefix(self, data: memoryview) -> int:
        taken = min(_PREFIX_BYTE_SIZE - len(self._gathered), len(data))
        self._gathered += data[:taken]
        if len(self._gathered) == _PREFIX_BYTE_SIZE:
            flag, length = PREFIX.unpack(self._gathered)
            self._gathered.clear()
            self._begin(flag, length)
        return taken

    def _begin(self, flag: int, length: int) -> None:
        limit = MAX_INFLATED_BYTE_SIZE if flag else MAX_MESSAGE_BYTE_SIZE
        if flag > 1:
            self.fault = MessageFault(Status.INTERNAL, f"invalid compressed flag {flag} of a message")
        elif flag and self._encoding not in _WINDOW_BITS:
            self.fault = MessageFault(Status.INTERNAL, "a compressed message, but grpc-encoding names no compression")
        elif length > limit:
            self._refuse_size(length, limit)
        else:
            self._compressed, self._length, self._filled = bool(flag), length, 0
            if not length:
                self._complete(b"")

    def _is_due(self) -> bool:
        """Whether a message should get its memory now: it is large, and whoever may know where has been asked.

        What comes together with the headers of a call comes before anybody has seen these.
        """
        enough = HEAD_BYTE_SIZE if self.place is not None else _MAX_GATHERED_BYTE_SIZE
        return self._length >= LARGE_BYTE_SIZE and len(self._gathered) >= enough

    def _allocate(self) -> None:
        """Give a large message memory, now that its begin is known."""
        head = self._gathered
        ask = self.place if not self._compressed else None
        placed = ask(bytes(head[:HEAD_BYTE_SIZE]), self._length) if ask is not None else None
        try:
            self._large = memoryview(mmap.mmap(-1, self._length)) if placed is None else placed
        except OSError:
            self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, f"no memory for a message of {self._length} bytes")
            return
        taken = len(head)
        self._large[:taken] = head
        head.clear()
        self.filled(taken)

    def _take_content(self, data: memoryview) -> int:
        if self._large is None and self._is_due():
            self._allocate()
            if self.fault is not None:
                return 0
        if self._large is not None:
            taken = min(self._length - self._filled, len(data))
            self._large[self._filled : self._filled + taken] = data[:taken]
            self.filled(taken)
            return taken
        taken = min(self._length - len(self._gathered), len(data))
        self._gathered += data[:taken]
        if len(self._gathered) == self._length:
            message, self._gathered = self._gathered, bytearray()
            self._complete(message)
        return taken

    def _complete(self, message: Buffer) -> None:
        self._large = None
        self._length = -1
        if self._compressed:
            inflated = self._inflate(message)
            if inflated is None:
                return
            message = inflated
        self.messages.append(message)

    def _inflate(self, message: Buffer) -> bytes | None:
        inflater = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        try:
            inflated = inflater.decompress(message, MAX_INFLATED_BYTE_SIZE + 1)
        except zlib.error:
            inflated = None
        if inflated is not None and len(inflated) > MAX_INFLATED_BYTE_SIZE:
            self.fault = MessageFault(
                Status.RESOURCE_EXHAUSTED, f"Decompressed message larger than max ({MAX_INFLATED_BYTE_SIZE})"
            )
            return None
        if inflated is None or not inflater.eof:
            self.fault = MessageFault(Status.INTERNAL, f"unable to decompress a message ({self._encoding})")
            return None
        return inflated

    def _refuse_size(self, length: int, limit: int) -> None:
        self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")
