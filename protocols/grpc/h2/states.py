"""What the head of a frame tells to be wrong, whatever has come before it (RFC 9113, 4.2 and 6). Pure."""

from __future__ import annotations

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode

#: Padding and priority come on top of a header block.
_MAX_HEADERS_PAYLOAD = limits.MAX_HEADER_BLOCK_BYTE_SIZE + 256 + 5

#: What the receiver of a connection must be able to hold: a frame that is no DATA, with its head.
MAX_HELD_BYTE_SIZE = frames.HEAD_BYTE_SIZE + _MAX_HEADERS_PAYLOAD

_FIXED_SIZES = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_ON_STREAMS = {frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION}
_ON_CONNECTION = {frames.SETTINGS, frames.PING, frames.GOAWAY}


def check_head(kind: int, flags: int, number: int, length: int) -> None:
    """Check a frame of `length` bytes on stream `number`. Raises `ConnectionFailure`."""
    if length > limits.MAX_FRAME_BYTE_SIZE:
        raise ConnectionFailure(H2ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
    if kind == frames.DATA:
        return
    if (number == 0 and kind in _ON_STREAMS) or (number and kind in _ON_CONNECTION):
        raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} on stream {number}")
    if kind == frames.PUSH_PROMISE:
        raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
    if kind in _FIXED_SIZES and length != _FIXED_SIZES[kind]:
        raise ConnectionFailure(H2ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} with {length} bytes")
    if kind == frames.SETTINGS:
        if length % frames.SETTING_BYTE_SIZE or (length and flags & frames.ACK):
            raise ConnectionFailure(H2ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {length} bytes")
        if length > limits.MAX_SETTINGS_ENTRIES * frames.SETTING_BYTE_SIZE:
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "too many entries in SETTINGS")
    elif length > _MAX_HEADERS_PAYLOAD and kind in (frames.HEADERS, frames.CONTINUATION):
        raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
