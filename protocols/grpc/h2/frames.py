"""Frames of HTTP/2 to and from bytes (RFC 9113, 4 and 6). Pure.

Knows how frames are written, not when they may be sent: that is in `states.py`.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shm.tensor import Buffer

#: The client's connection preface, before its first frame (RFC 9113, 3.4).
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

#: A frame header: length of the payload (high 16 bits, low 8 bits), type, flags, stream identifier.
FRAME_HEADER = struct.Struct(">HBBBL")
FRAME_HEADER_BYTE_SIZE = FRAME_HEADER.size

#: Types of frames.
DATA = 0x0
HEADERS = 0x1
PRIORITY = 0x2
RST_STREAM = 0x3
SETTINGS = 0x4
PUSH_PROMISE = 0x5
PING = 0x6
GOAWAY = 0x7
WINDOW_UPDATE = 0x8
CONTINUATION = 0x9

#: Flags.
END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FLAG = 0x20

#: The highest bit of a stream identifier and of a window increment is reserved and ignored.
STREAM_ID_MASK = 2**31 - 1
MAX_WINDOW = 2**31 - 1

#: What a peer accepts until its SETTINGS say otherwise, and the largest value that SETTINGS can name.
DEFAULT_MAX_FRAME_BYTE_SIZE = 2**14
LARGEST_MAX_FRAME_BYTE_SIZE = 2**24 - 1
DEFAULT_WINDOW_BYTE_SIZE = 2**16 - 1

_UINT32 = struct.Struct(">L")
_SETTING = struct.Struct(">HL")
SETTING_BYTE_SIZE = _SETTING.size


class Setting(enum.IntEnum):
    """Identifiers of the entries of SETTINGS (RFC 9113, 6.5.2)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class H2ErrorCode(enum.IntEnum):
    """Why a stream or a connection ends (RFC 9113, 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFailure(Exception):
    """A connection error (RFC 9113, 5.4.1): the client gets GOAWAY with `code` and `text`, and the connection ends."""

    def __init__(self, code: H2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def frame_header(byte_size: int, frame_type: int, flags: int, stream_id: int) -> bytes:
    """Return the header of a frame with a payload of `byte_size` bytes."""
    return FRAME_HEADER.pack(byte_size >> 8, byte_size & 0xFF, frame_type, flags, stream_id)


def headers(stream_id: int, block: bytes, *, max_byte_size: int, end_stream: bool) -> bytes:
    """Return a header block as HEADERS and, where it is larger than a frame may be, CONTINUATION."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_byte_size:
        return frame_header(len(block), HEADERS, flags | END_HEADERS, stream_id) + block
    parts: list[bytes] = []
    for start in range(0, len(block), max_byte_size):
        part = block[start : start + max_byte_size]
        frame_type = CONTINUATION if start else HEADERS
        last = END_HEADERS if start + max_byte_size >= len(block) else 0
        parts += (frame_header(len(part), frame_type, last | (0 if start else flags), stream_id), part)
    return b"".join(parts)


def data(stream_id: int, parts: Sequence[memoryview], max_byte_size: int) -> tuple[list[Buffer], int]:
    """Return `parts` as DATA frames of at most `max_byte_size` bytes, in pieces, and the size of all pieces.

    The parts are not copied.
    """
    left = sum(map(len, parts))
    full_header = frame_header(max_byte_size, DATA, 0, stream_id)
    pieces: list[Buffer] = []
    byte_size, room = left, 0
    for part in parts:
        position, size = 0, len(part)
        while position < size:
            if not room:
                room = min(left, max_byte_size)
                left -= room
                byte_size += FRAME_HEADER_BYTE_SIZE
                pieces.append(full_header if room == max_byte_size else frame_header(room, DATA, 0, stream_id))
            end = min(position + room, size)
            pieces.append(part[position:end])
            room -= end - position
            position = end
    return pieces, byte_size


def settings(values: Iterable[tuple[Setting, int]]) -> bytes:
    payload = b"".join(_SETTING.pack(setting, value) for setting, value in values)
    return frame_header(len(payload), SETTINGS, 0, 0) + payload


def settings_entries(payload: memoryview) -> list[tuple[int, int]]:
    """Return the entries of a SETTINGS payload, whose size is a multiple of an entry's."""
    return list(_SETTING.iter_unpack(payload))


SETTINGS_ACK = frame_header(0, SETTINGS, ACK, 0)

#: A ping that asks the peer for an acknowledgement.
PING_REQUEST = frame_header(8, PING, 0, 0) + bytes(8)


def ping_ack(payload: memoryview) -> bytes:
    return frame_header(len(payload), PING, ACK, 0) + payload


def rst_stream(stream_id: int, code: H2ErrorCode) -> bytes:
    return frame_header(4, RST_STREAM, 0, stream_id) + _UINT32.pack(code)


def window_update(stream_id: int, increment: int) -> bytes:
    return frame_header(4, WINDOW_UPDATE, 0, stream_id) + _UINT32.pack(increment)


def goaway(last_stream_id: int, code: H2ErrorCode, text: str = "") -> bytes:
    payload = _UINT32.pack(last_stream_id) + _UINT32.pack(code) + text.encode()
    return frame_header(len(payload), GOAWAY, 0, 0) + payload


def uint32(payload: memoryview) -> int:
    """Return the 32-bit number at the start of a payload."""
    number: int = _UINT32.unpack_from(payload)[0]
    return number
