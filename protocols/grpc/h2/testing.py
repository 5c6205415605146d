"""Frames for tests of the parts of a connection, as clients send them and as no client does."""

from __future__ import annotations

from protocols.grpc.framing import PREFIX
from protocols.grpc.h2 import frames
from protocols.grpc.h2.headers import encode_block

#: The headers of a call.
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/service/Method"),
    (":authority", "server"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]

#: The connection preface of a client.
CLIENT_PREFACE = frames.PREFACE + frames.settings([])


def frame(frame_type: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame; nothing about it is checked."""
    return frames.frame_header(len(payload), frame_type, flags, stream_id) + payload


def request_headers(
    stream_id: int, fields: list[tuple[str, str]] = FIELDS, *, flags: int = frames.END_HEADERS
) -> bytes:
    """Return the headers of a call in one frame."""
    return frame(frames.HEADERS, flags, stream_id, encode_block(fields))


def message(content: bytes, *, compressed_flag: int = 0) -> bytes:
    """Return a message with its prefix, as DATA carries it."""
    return PREFIX.pack(compressed_flag, len(content)) + content
