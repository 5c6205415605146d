"""Frames for tests of the state machine, as clients send them and as no client does."""

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

#: What a client begins a connection with.
GREETING = frames.PREFACE + frames.settings([])


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """Return a frame; nothing about it is checked."""
    return frames.head(len(payload), kind, flags, number) + payload


def request(number: int, fields: list[tuple[str, str]] = FIELDS, *, flags: int = frames.END_HEADERS) -> bytes:
    """Return the headers of a call in one frame."""
    return frame(frames.HEADERS, flags, number, encode_block(fields))


def message(content: bytes, *, flag: int = 0) -> bytes:
    """Return a message with its prefix, as DATA carries it; `flag` says that it is compressed."""
    return PREFIX.pack(flag, len(content)) + content
