"""Usual frames that have arrived completely are taken in one step, with the same result as frame by frame."""

import pytest

from protocols.grpc.framing import MESSAGE_START_BYTE_SIZE, PREFIX
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import H2ErrorCode
from protocols.grpc.h2.streams import Stream, StreamEvent
from protocols.grpc.h2.testing import CLIENT_PREFACE, FIELDS, frame, message, request_headers

CONTENT = bytes(range(64))
LARGE = CONTENT * 1100

#: The bytes of a message with CONTENT.
LENGTH = len(CONTENT) + PREFIX.size


def call(number: int, between: bytes = b"", content: bytes = CONTENT) -> bytes:
    return request_headers(number) + between + sent(number, content, flags=frames.END_STREAM)


def announced(number: int, length: int, between: bytes = b"", content: bytes = CONTENT) -> bytes:
    """Return a call whose headers say how many bytes its DATA has, as those of h2load do."""
    headers = request_headers(number, [*FIELDS, ("content-length", str(length))])
    return headers + between + sent(number, content, flags=frames.END_STREAM)


def sent(number: int, content: bytes = CONTENT, *, flag: int = 0, flags: int = 0) -> bytes:
    """Return a message of a stream in a frame of its own."""
    return frame(frames.DATA, flags, number, message(content, compressed_flag=flag))


def connection_that_knows_the_headers() -> H2Connection:
    connection = H2Connection()
    octets = CLIENT_PREFACE + call(1)
    assert connection.receiving.receive(memoryview(octets), 0) == len(octets)
    connection.streams.events.clear()
    connection.sending.write_queue.take()
    return connection


def fed(octets: bytes, step: int) -> H2Connection:
    """Return a connection that has received `octets` in pieces of `step` bytes."""
    connection, rest = connection_that_knows_the_headers(), b""
    for start in range(0, len(octets), step):
        rest += octets[start : start + step]
        while taken := connection.receiving.receive(memoryview(rest), 0):
            rest = rest[taken:]
    return connection


def messages(stream: Stream) -> list[bytes]:
    """Return the messages of a stream as bytes."""
    return [bytes(message) for message in stream.message_reader.messages]  # type: ignore[arg-type]


def state(connection: H2Connection) -> object:
    """Return all that frames can have changed."""
    streams = [
        (
            each.id,
            each.send_window,
            each.held_byte_size,
            each.received_byte_size,
            each.request_ended,
            messages(each),
            each.message_reader.fault,
        )
        for each in connection.streams.by_id.values()
        if each.id > 1
    ]
    windows = connection.peer_limits.send_window, connection.streams.last_id
    return streams, windows, connection.sending.ended, b"".join(connection.sending.write_queue.take())


#: What may be sent around a call, and what is wrong with it: all of it must have the same result as frame by frame.
SEQUENCES = {
    "alone": call(3),
    "window update between": call(3, frames.window_update(3, 5)),
    "window updates around": frames.window_update(0, 189) + call(3, frames.window_update(3, 5))
    + frames.window_update(0, 9),
    "two calls": call(3, frames.window_update(3, 5)) + call(5),
    "the announced length": announced(3, LENGTH) + announced(5, LENGTH, frames.window_update(5, 5)),
    "another length than announced": announced(3, LENGTH) + announced(5, LENGTH - 1) + announced(7, LENGTH + 1),
    "large calls with the announced length": announced(3, len(LARGE) + 5, content=LARGE)
    + announced(5, len(LARGE) + 5, content=LARGE) + announced(7, len(LARGE), content=LARGE),
    "two updates between": call(3, frames.window_update(3, 5) + frames.window_update(3, 7)),
    "update of another stream": call(3, frames.window_update(1, 5)),
    "update of the connection between": call(3, frames.window_update(0, 5)),
    "update of nothing": call(3, frames.window_update(3, 0)),
    "update that is too large": call(3, frames.window_update(3, frames.MAX_WINDOW)),
    "update with the reserved bit": call(3, frame(frames.WINDOW_UPDATE, 0, 3, b"\x80\x00\x00\x05")),
    "update of a stream that is not open": call(3, frames.window_update(9, 5)),
    "update of the connection by nothing": frames.window_update(0, 0) + call(3),
    "update of the connection that is too large": frames.window_update(0, frames.MAX_WINDOW) + call(3),
    "update of a wrong length": call(3, frame(frames.WINDOW_UPDATE, 0, 3, b"12345")),
    "ping between": call(3, frame(frames.PING, 0, 0, bytes(8))),
    "lower number": call(5) + call(3),
    "even number": call(4),
    "empty message": call(3, content=b""),
    "update in front of an empty message": call(3, frames.window_update(3, 5), content=b""),
    "a message of a stream": request_headers(3) + sent(3),
    "messages of two streams": request_headers(3) + request_headers(5) + sent(3) + sent(5) + sent(3, b"x" * 300),
    "updates of a stream": request_headers(3) + frames.window_update(3, 5) + sent(3) + frames.window_update(3, 7),
    "update of a stream by nothing": request_headers(3) + frames.window_update(3, 0) + sent(3),
    "update of a stream that is too large": request_headers(3) + frames.window_update(3, frames.MAX_WINDOW) + sent(3),
    "update of a stream that has ended": request_headers(3) + frame(frames.RST_STREAM, 0, 3, bytes(4))
    + frames.window_update(3, 5),
    "the last message": request_headers(3) + sent(3) + sent(3, flags=frames.END_STREAM),
    "message behind the last": request_headers(3) + sent(3, flags=frames.END_STREAM) + sent(3),
    "message of a stream that is not open": sent(9),
    "message on the connection": sent(0),
    "empty message of a stream": request_headers(3) + sent(3, b""),
    "empty DATA": request_headers(3) + frame(frames.DATA, 0, 3) + sent(3),
    "a message in two frames": request_headers(3) + frame(frames.DATA, 0, 3, b"\0\0\0\0\x40" + CONTENT[:30])
    + frame(frames.DATA, 0, 3, CONTENT[30:]) + sent(3),
    "a prefix in two frames": request_headers(3) + frame(frames.DATA, 0, 3, b"\0\0")
    + frame(frames.DATA, 0, 3, b"\0\0\x40" + CONTENT),
    "two messages in one frame": request_headers(3) + frame(frames.DATA, 0, 3, (b"\0\0\0\0\x40" + CONTENT) * 2),
    "message with the compressed flag": request_headers(3) + sent(3, flag=1) + sent(3),
    "message with an unknown flag": request_headers(3) + sent(3, flag=2) + sent(3),
    "large calls": call(3, frames.window_update(3, 5), content=LARGE) + call(5, content=LARGE[1:]) + call(7),
    "a large call that is refused by its number": call(5) + call(3, content=LARGE),
    "a large call with the compressed flag": request_headers(3) + sent(3, LARGE, flag=1, flags=frames.END_STREAM),
    "a frame that is too large": call(3, content=bytes(limits.MAX_FRAME_BYTE_SIZE)),
    "more than the stream's window": request_headers(3)
    + sent(3, bytes(60_000)) * (limits.STREAM_WINDOW_BYTE_SIZE // 60_000 + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_frames_have_the_same_result_complete_and_in_pieces(name: str) -> None:
    octets = SEQUENCES[name]
    step = 1 if len(octets) < 10_000 else 1_000  # too little for anything to be taken in one step
    expected = state(fed(octets, step))
    assert state(fed(octets, len(octets))) == expected
    assert state(fed(octets, 40 * step)) == expected


@pytest.mark.parametrize("between", [b"", frames.window_update(3, 5)], ids=["plain", "as gRPC core sends it"])
def test_the_usual_small_call_is_one_event(between: bytes) -> None:
    connection = fed(call(3, between), 10_000)
    [(event, stream)] = connection.streams.events
    assert event is StreamEvent.COMPLETE
    assert stream.complete_message == CONTENT
    assert stream.send_window == frames.DEFAULT_WINDOW_BYTE_SIZE + (5 if between else 0)


def test_a_small_call_of_the_announced_length_is_one_event() -> None:
    connection = fed(announced(3, LENGTH), 10_000)  # after this its headers are known
    connection.streams.events.clear()
    connection.receiving.receive(memoryview(announced(5, LENGTH)), 0)
    assert [event for event, _ in connection.streams.events] == [StreamEvent.COMPLETE]


@pytest.mark.parametrize("between", [b"", frames.window_update(3, 5)], ids=["plain", "as gRPC core sends it"])
def test_a_large_call_begins_in_one_step_and_then_chooses_the_buffer_for_the_rest(between: bytes) -> None:
    connection = connection_that_knows_the_headers()
    octets = memoryview(call(3, between, LARGE))[:30_000]
    taken = connection.receiving.receive(octets, 0)
    [(event, stream)] = connection.streams.events
    assert event is StreamEvent.OPENED
    memory = bytearray(len(LARGE))
    asked: list[tuple[bytes, int]] = []

    def choose(message_start: bytes, byte_size: int) -> memoryview:
        asked.append((message_start, byte_size))
        return memoryview(memory)

    stream.message_reader.choose_buffer = choose
    direct = connection.receiving.stream_frames.direct_buffer()
    assert direct is not None
    assert asked == [(LARGE[:MESSAGE_START_BYTE_SIZE], len(LARGE))]
    assert len(direct) == len(LARGE) - MESSAGE_START_BYTE_SIZE
    assert octets[taken:] == LARGE[MESSAGE_START_BYTE_SIZE:][: len(octets) - taken]
    direct[:] = LARGE[MESSAGE_START_BYTE_SIZE:]
    connection.receiving.stream_frames.received_directly(len(direct))
    assert connection.streams.events[1:] == [(StreamEvent.READABLE, stream)]
    assert messages(stream) == [LARGE]
    assert memory == LARGE
    assert stream.request_ended


def test_the_usual_message_of_a_stream_is_one_event_and_has_its_bytes() -> None:
    connection = fed(request_headers(3), 10_000)
    connection.streams.events.clear()
    octets = sent(3) + frames.window_update(3, 9)
    assert connection.receiving.receive(memoryview(octets), 0) == len(octets)
    [(event, stream)] = connection.streams.events
    assert event is StreamEvent.READABLE
    assert messages(stream) == [CONTENT]
    assert stream.send_window == frames.DEFAULT_WINDOW_BYTE_SIZE + 9


def test_a_complete_call_beyond_the_limit_of_streams_is_refused() -> None:
    connection = connection_that_knows_the_headers()
    last = 1 + 2 * limits.MAX_CONCURRENT_STREAMS
    for number in range(3, last + 2, 2):
        octets = call(number, frames.window_update(number, 5))
        assert connection.receiving.receive(memoryview(octets), 0) == len(octets)
    assert len(connection.streams.by_id) == limits.MAX_CONCURRENT_STREAMS
    sent_octets = b"".join(connection.sending.write_queue.take())
    assert frames.rst_stream(last, H2ErrorCode.REFUSED_STREAM) in sent_octets


def test_an_incomplete_window_update_of_the_connection_waits() -> None:
    connection = connection_that_knows_the_headers()
    octets = frames.window_update(0, 189)
    for size in range(len(octets)):
        assert connection.receiving.receive(memoryview(octets[:size]), 0) == 0
    assert connection.receiving.receive(memoryview(octets), 0) == len(octets)
