"""For tests of the parts of a connection: frames as clients send them and as no client does, and what came of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.grpc.framing import PREFIX
from protocols.grpc.h2 import frames
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import H2ErrorCode
from protocols.grpc.h2.headers import encode_block

if TYPE_CHECKING:
    from protocols.grpc.h2.limits import KeepaliveRules
    from protocols.grpc.h2.sending import WriteQueue
    from protocols.grpc.h2.streams import StreamEvent, Streams

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

END_BOTH = frames.END_HEADERS | frames.END_STREAM


# ---- what a client sends --------------------------------------------------------------------


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


# ---- a connection ---------------------------------------------------------------------------


def open_connection(rules: KeepaliveRules | None = None) -> H2Connection:
    """Return a connection whose client has sent its preface; what it has sent itself is taken."""
    connection = H2Connection(rules)
    feed(connection, CLIENT_PREFACE)
    connection.sending.write_queue.take()
    return connection


def feed(connection: H2Connection, octets: bytes, now_ns: int = 0) -> None:
    """Hand `octets` in as a transport does, one event-loop iteration after the other."""
    rest = memoryview(octets)
    while True:
        rest = rest[connection.receiving.receive(rest, now_ns) :]
        if not connection.receiving.has_more:
            return


def sent_frames(queue: WriteQueue) -> list[tuple[int, int, int, bytes]]:
    """Return type, flags, stream id and payload of every frame in `queue`, which is empty then."""
    octets = b"".join(queue.take())
    found = []
    while octets:
        high, low, frame_type, flags, stream_id = frames.FRAME_HEADER.unpack_from(octets)
        end = frames.FRAME_HEADER_BYTE_SIZE + (high << 8 | low)
        assert len(octets) >= end, "a frame was not sent completely"
        found.append((frame_type, flags, stream_id, octets[frames.FRAME_HEADER_BYTE_SIZE : end]))
        octets = octets[end:]
    return found


def resets(queue: WriteQueue) -> list[tuple[int, H2ErrorCode]]:
    """Return stream and code of every RST_STREAM in `queue`, which is empty then."""
    return [
        (stream_id, H2ErrorCode(int.from_bytes(payload, "big")))
        for frame_type, _, stream_id, payload in sent_frames(queue)
        if frame_type == frames.RST_STREAM
    ]


def failure(connection: H2Connection) -> H2ErrorCode:
    """Return why a connection that has ended did so: its last frame is GOAWAY."""
    assert connection.sending.ended
    *_, (frame_type, _, stream_id, payload) = sent_frames(connection.sending.write_queue)
    assert (frame_type, stream_id) == (frames.GOAWAY, 0)
    return H2ErrorCode(int.from_bytes(payload[4:8], "big"))


def take_events(streams: Streams) -> list[tuple[StreamEvent, int]]:
    """Return the events so far with the ids of their streams; the list is empty then."""
    events, streams.events = streams.events, []
    return [(event, stream.id) for event, stream in events]
