"""Frames on a byte stream: a little-endian 32-bit length, then one message. Pure."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")

#: Placeholder for a length that is not known yet.
LENGTH_PLACE = bytes(LENGTH.size)

#: The largest length of a message from the kernel, in bytes. An `Execute` has the small tensors of all its requests.
MAX_KERNEL_FRAME = 1 << 30

#: The largest length of a message from a worker, in bytes. The largest that must stay in one piece is a response: up to
#: 4 KiB for each output (`shm.arena.INLINE_LIMIT`), and its parameters. A configuration in JSON and an error text are
#: smaller, a chunk of a tensor has 256 KiB, and larger messages are sent in parts.
MAX_WORKER_FRAME = 1 << 24


class BadFrame(ValueError):
    """The peer announced a message that is longer than any that it may send."""


class FrameTooLarge(ValueError):
    """A message is longer than a worker may send."""

    def __init__(self, byte_size: int) -> None:
        super().__init__(f"a message of {byte_size} bytes, the largest has {MAX_WORKER_FRAME}")


def frame(message: bytes) -> bytes:
    """Return `message` after its length."""
    return LENGTH.pack(len(message)) + message


#: The most bytes that are read at once when a message needs them: a chunk of a tensor has 256 KiB.
MAX_READ = 1 << 18


class FrameReader:
    """Collects received bytes and returns complete messages, each of at most `max_frame` bytes."""

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._buffer = bytearray()
        #: How many bytes the message that is not complete lacks, up to `MAX_READ`; 0 if that is not known.
        self.wanted = 0

    @property
    def incomplete_byte_size(self) -> int:
        """How many bytes of a message that is not complete were received, with the bytes of its length."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data` and return the messages that are complete now. Raises `BadFrame`."""
        buffer = self._buffer
        if buffer:
            self.wanted = 0
        # Usually one read has complete messages only, and the buffer is empty.
        source: bytes | bytearray = buffer if buffer else data
        if buffer:
            buffer += data
        messages: list[bytes] = []
        position, size = 0, len(source)
        while size - position >= 4:
            (length,) = LENGTH.unpack_from(source, position)
            if length > self._max_frame:
                raise BadFrame(f"a message of {length} bytes, the largest has {self._max_frame}")
            end = position + 4 + length
            if end > size:
                self.wanted = min(end - size, MAX_READ)
                break
            if source is buffer:
                with memoryview(source) as view:  # one copy; a slice of the buffer would be another one
                    messages.append(bytes(view[position + 4 : end]))
            else:
                messages.append(bytes(source[position + 4 : end]))
            position = end
        if source is data:
            if position < size:
                buffer += data[position:]
        else:
            del buffer[:position]
        return messages
