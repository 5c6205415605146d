"""Frames on a byte stream: a little-endian 32-bit length, then one message. Pure."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")

#: Placeholder for a length that is not known yet.
LENGTH_PLACE = bytes(LENGTH.size)

#: The largest length of a message in bytes. A peer that announces more is broken.
MAX_FRAME = 1 << 30


class BadFrame(ValueError):
    """The peer sent a length above `MAX_FRAME`."""


def frame(message: bytes) -> bytes:
    """Return `message` after its length."""
    return LENGTH.pack(len(message)) + message


class FrameReader:
    """Collects received bytes and returns complete messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data` and return the messages that are complete now. Raises `BadFrame`."""
        buffer = self._buffer
        # Usually one read has complete messages only, and the buffer is empty.
        source: bytes | bytearray = buffer if buffer else data
        if buffer:
            buffer += data
        messages: list[bytes] = []
        position, size = 0, len(source)
        while size - position >= 4:
            (length,) = LENGTH.unpack_from(source, position)
            if length > MAX_FRAME:
                raise BadFrame(f"a frame of {length} bytes")
            end = position + 4 + length
            if end > size:
                break
            messages.append(bytes(source[position + 4 : end]))
            position = end
        if source is data:
            if position < size:
                buffer += data[position:]
        else:
            del buffer[:position]
        return messages
