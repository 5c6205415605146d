"""Frames of HTTP/2 to and from bytes (RFC 9113, 4 and 6). Pure.

Knows how frames look, not when they may come; that is for `connection.py`.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What a client sends first.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

#: The head of a frame: length (high 16 bits, low 8), type, flags, stream number.
HEAD = struct.Struct(">HBBBL")
HEAD_BYTE_SIZE = HEAD.size

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

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FLAG = 0x20

#: The highest bit of a stream number and of a window increment is reserved and ignored.
NUMBER_MASK = 2**31 - 1
MAX_WINDOW = 2**31 - 1

#: What a peer takes until its SETTINGS say otherwise, and the most that SETTINGS can say.
DEFAULT_MAX_FRAME_BYTE_SIZE = 2**14
LARGEST_MAX_FRAME_BYTE_SIZE = 2**24 - 1
DEFAULT_WINDOW_BYTE_SIZE = 2**16 - 1

_WORD = struct.Struct(">L")
_SETTING = struct.Struct(">HL")
SETTING_BYTE_SIZE = _SETTING.size


class Setting(enum.IntEnum):
    """What SETTINGS set."""

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
    """The peer did what ends the connection; it is told `code` and `text` by GOAWAY."""

    def __init__(self, code: H2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def head(byte_size: int, kind: int, flags: int, number: int) -> bytes:
    """Return the head of a frame with a payload of `byte_size` bytes."""
    return HEAD.pack(byte_size >> 8, byte_size & 0xFF, kind, flags, number)


def headers(number: int, block: bytes, *, max_byte_size: int, end_stream: bool) -> bytes:
    """Return a header block as HEADERS and, where it is larger than a frame may be, CONTINUATION."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_byte_size:
        return head(len(block), HEADERS, flags | END_HEADERS, number) + block
    parts: list[bytes] = []
    for start in range(0, len(block), max_byte_size):
        part = block[start : start + max_byte_size]
        kind = CONTINUATION if start else HEADERS
        last = END_HEADERS if start + max_byte_size >= len(block) else 0
        parts += (head(len(part), kind, last | (0 if start else flags), number), part)
    return b"".join(parts)


def settings(values: Iterable[tuple[Setting, int]]) -> bytes:
    payload = b"".join(_SETTING.pack(setting, value) for setting, value in values)
    return head(len(payload), SETTINGS, 0, 0) + payload


def settings_of(payload: memoryview) -> list[tuple[int, int]]:
    """Return the entries of a SETTINGS payload, whose size is a multiple of an entry's."""
    return list(_SETTING.iter_unpack(payload))


SETTINGS_ACK = head(0, SETTINGS, ACK, 0)


PING_REQUEST = head(8, PING, 0, 0) + bytes(8)


def ping_ack(payload: memoryview) -> bytes:
    return head(len(payload), PING, ACK, 0) + payload


def rst_stream(number: int, code: H2ErrorCode) -> bytes:
    return head(4, RST_STREAM, 0, number) + _WORD.pack(code)


def window_update(number: int, increment: int) -> bytes:
    return head(4, WINDOW_UPDATE, 0, number) + _WORD.pack(increment)


def goaway(last_number: int, code: H2ErrorCode, text: str = "") -> bytes:
    payload = _WORD.pack(last_number) + _WORD.pack(code) + text.encode()
    return head(len(payload), GOAWAY, 0, 0) + payload


def word(payload: memoryview) -> int:
    """Return the 32-bit number at the start of a payload."""
    number: int = _WORD.unpack_from(payload)[0]
    return number
