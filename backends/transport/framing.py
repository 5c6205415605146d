"""Frames on a byte stream: a little-endian 32-bit length, then one message. Pure."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")

#: Stands where a length belongs that is not known yet.
LENGTH_PLACE = bytes(LENGTH.size)

#: A longer frame cannot be ours: whoever sent it is broken.
MAX_FRAME = 1 << 30


class BadFrame(ValueError):
    """The other side sent a length that no message of ours has."""


def frame(message: bytes) -> bytes:
    """Return `message` with its length in front."""
    return LENGTH.pack(len(message)) + message


class FrameReader:
    """Collects received bytes and gives out whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data` and return every message that is complete now. Raises `BadFrame`."""
        buffer = self._buffer
        # Most of the time one read holds whole messages and nothing is waiting.
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
