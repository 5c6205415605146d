"""Whatever frames come in whatever order: the connection never raises, and keeps to the rules for its own frames."""

from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.headers import encode_block, status_trailers
from protocols.grpc.h2.streams import StreamEvent

BLOCK = encode_block([(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("te", "trailers")])
NUMBERS = st.sampled_from([0, 1, 1, 3, 3, 5, 7, 2, 2**31 - 1])

payloads = st.one_of(
    st.binary(max_size=20),
    st.just(BLOCK),
    st.just(b"\x00\x00\x00\x00\x03abc"),
    st.sampled_from([bytes(4), bytes(5), bytes(8), b"\x00\x00\x00\x01", b"\x7f\xff\xff\xff"]),
)


@st.composite
def frame(draw: st.DrawFn) -> bytes:
    payload = draw(payloads)
    kind = draw(st.one_of(st.integers(0, 10), st.sampled_from([frames.HEADERS, frames.DATA])))
    flags = draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 4, 5])))
    return frames.frame_header(len(payload), kind, flags, draw(NUMBERS)) + payload


@given(st.lists(st.one_of(frame(), st.binary(max_size=12)), max_size=30), st.integers(1, 64), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_frames_get_valid_frames_or_the_end(parts: list[bytes], step: int, responds: bool) -> None:
    connection = H2Connection()
    octets = frames.PREFACE + frames.settings([]) + b"".join(parts)
    written = b""
    buffer = b""
    for start in range(0, len(octets), step):
        buffer += octets[start : start + step]
        taken = connection.receiving.receive(memoryview(buffer), start)
        assert 0 <= taken <= len(buffer)
        buffer = buffer[taken:]
        events, connection.streams.events = connection.streams.events, []
        for event, stream in events:
            if event is StreamEvent.READABLE and stream.is_open:
                stream.message_reader.messages.clear()
                connection.sending.consumed(stream)
                if responds:
                    connection.sending.respond(stream, [b"response"], lambda: None)
                else:
                    connection.sending.send_trailers(stream, status_trailers(1, "no"))
        connection.sending.pump(2**20)
        written += b"".join(connection.sending.write_queue.take())
        assert len(connection.streams.by_id) <= limits.MAX_CONCURRENT_STREAMS
    check_frames(written, failed=connection.sending.ended)
    connection.sending.close()
    assert connection.streams.by_id == {}


def check_frames(octets: bytes, *, failed: bool) -> None:
    kinds = []
    while octets:
        high, low, kind, _, number = frames.FRAME_HEADER.unpack_from(octets)
        end = 9 + (high << 8 | low)
        assert len(octets) >= end
        assert (number == 0) == (kind in (frames.SETTINGS, frames.PING, frames.GOAWAY)) or kind == frames.WINDOW_UPDATE
        kinds.append(kind)
        octets = octets[end:]
    assert (frames.GOAWAY in kinds) == failed
    if failed:
        assert kinds.index(frames.GOAWAY) == len(kinds) - 1


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_at_all_end_the_connection_or_wait_for_more(octets: bytes) -> None:
    connection = H2Connection()
    connection.receiving.receive(memoryview(octets), 0)
    assert connection.sending.ended or frames.PREFACE.startswith(octets[: len(frames.PREFACE)])
