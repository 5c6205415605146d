"""What the client's frames do to its streams, one after the other, without the bytes of frame headers.

Usual frames that have arrived completely are taken in one step, with the same result as frame by frame.
"""

import pytest

from kernel.errors import MemoryFull
from protocols.grpc.framing import MESSAGE_START_BYTE_SIZE, PREFIX, MessageMemory
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode
from protocols.grpc.h2.headers import RequestHeadDecoder, encode_block, request_head
from protocols.grpc.h2.limits import FloodCounters
from protocols.grpc.h2.sending import SendingHalf
from protocols.grpc.h2.states import StreamState
from protocols.grpc.h2.stream_frames import StreamFrames
from protocols.grpc.h2.streams import PeerLimits, ReceiveWindow, Stream, StreamEvent, Streams
from shm.blocks import ByteBudget
from tests.protocols.grpc.h2.client_frames import (
    CLIENT_PREFACE,
    FIELDS,
    feed,
    frame,
    message,
    request_headers,
    resets,
    sent_frames,
    take_events,
)

HEAD = request_head(FIELDS)


class Receiver:
    """The part for frames of streams, with what it shares; `byte_size` is the window of the connection."""

    def __init__(self, byte_size: int = 2**20) -> None:
        self.streams = Streams()
        self.peer = PeerLimits()
        window = ReceiveWindow(byte_size)
        self.sending = SendingHalf(self.streams, self.peer, window)
        self.sending.write_queue.take()
        self.frames = StreamFrames(self.streams, self.peer, window, self.sending, FloodCounters(), RequestHeadDecoder())

    def data(self, stream_id: int, octets: bytes, *, flags: int = 0, padding: int = 0) -> None:
        """Take a DATA frame with `octets` and `padding`, which has arrived completely."""
        padded = bool(flags & frames.PADDED)
        self.frames.begin_data(stream_id, flags, len(octets) + padded + padding, padding)
        rest = memoryview(octets + bytes(padding))
        while self.frames.unfinished is not None:
            assert rest, "the frame has more bytes than were given"
            rest = rest[self.frames.take_data(rest) :]
        assert not rest

    def messages(self, stream_id: int) -> list[bytes]:
        return [bytes(found) for found in self.streams.by_id[stream_id].message_reader.messages]  # type: ignore[arg-type]

    @property
    def resets(self) -> list[tuple[int, H2ErrorCode]]:
        return resets(self.sending.write_queue)

    @property
    def events(self) -> list[tuple[StreamEvent, int]]:
        return take_events(self.streams)


# ---- HEADERS --------------------------------------------------------------------------------


def test_headers_open_a_stream_with_the_initial_window_of_the_client() -> None:
    receiver = Receiver()
    receiver.peer.initial_send_window = 777
    receiver.frames.take_headers(5, HEAD, end_stream=False)
    assert receiver.events == [(StreamEvent.OPENED, 5)]
    stream = receiver.streams.by_id[5]
    assert (stream.send_window, stream.state, stream.request_head) == (777, StreamState.OPEN, HEAD)
    assert receiver.streams.last_id == 5


def test_headers_that_end_the_stream_are_a_request_without_a_message() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=True)
    assert receiver.events == [(StreamEvent.OPENED, 1), (StreamEvent.READABLE, 1)]
    assert receiver.streams.by_id[1].request_ended


def test_trailers_end_the_request() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.frames.take_headers(1, HEAD, end_stream=True)
    assert receiver.events == [(StreamEvent.OPENED, 1), (StreamEvent.READABLE, 1)]
    assert receiver.streams.by_id[1].request_ended


def test_a_malformed_request_is_reset_and_counted() -> None:
    receiver = Receiver()
    malformed = request_head([*FIELDS, ("Upper", "case")])
    for number in range(1000):
        receiver.frames.take_headers(2 * number + 1, malformed, end_stream=True)
    assert receiver.resets[-1] == (1999, H2ErrorCode.PROTOCOL_ERROR)
    assert receiver.events == []
    with pytest.raises(ConnectionFailure, match="too many streams reset"):
        receiver.frames.take_headers(2001, malformed, end_stream=True)


def test_streams_over_the_limit_are_refused() -> None:
    receiver = Receiver()
    last = 2 * limits.MAX_CONCURRENT_STREAMS + 1
    for stream_id in range(1, last + 2, 2):
        receiver.frames.take_headers(stream_id, HEAD, end_stream=False)
    assert len(receiver.streams.by_id) == limits.MAX_CONCURRENT_STREAMS
    assert receiver.resets == [(last, H2ErrorCode.REFUSED_STREAM)]
    assert receiver.streams.state_of(last) is StreamState.RESET


def test_a_request_with_another_length_than_announced_is_reset() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, request_head([*FIELDS, ("content-length", "9")]), end_stream=False)
    receiver.data(1, message(b"abc"), flags=frames.END_STREAM)
    assert receiver.resets == [(1, H2ErrorCode.PROTOCOL_ERROR)]
    assert receiver.events == [(StreamEvent.OPENED, 1), (StreamEvent.CLOSED, 1)]


def test_that_the_request_has_ended_is_known_also_when_the_stream_is_closed() -> None:
    receiver = Receiver()
    for stream_id, end_stream in ((1, True), (3, False)):
        receiver.frames.take_headers(stream_id, HEAD, end_stream=end_stream)
    streams = list(receiver.streams.by_id.values())
    receiver.sending.close()
    assert [stream.is_open for stream in streams] == [False, False]
    assert [stream.request_ended for stream in streams] == [True, False]


# ---- RST_STREAM and WINDOW_UPDATE -----------------------------------------------------------


def test_a_client_that_resets_its_call_is_heard() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=True)
    stream = receiver.streams.by_id[1]
    receiver.frames.take_rst_stream(1)
    assert receiver.events[-1] == (StreamEvent.CLOSED, 1)
    assert not stream.is_open
    assert sent_frames(receiver.sending.write_queue) == [], "a reset gets no response"


def test_window_updates_open_the_window_of_the_stream_or_the_connection() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.frames.take_window_update(1, 5)
    receiver.frames.take_window_update(0, 7)
    assert receiver.streams.by_id[1].send_window == frames.DEFAULT_WINDOW_BYTE_SIZE + 5
    assert receiver.peer.send_window == frames.DEFAULT_WINDOW_BYTE_SIZE + 7


@pytest.mark.parametrize(
    ("increment", "code"), [(0, H2ErrorCode.PROTOCOL_ERROR), (frames.MAX_WINDOW, H2ErrorCode.FLOW_CONTROL_ERROR)]
)
def test_a_window_update_of_a_stream_by_nothing_or_too_much_resets_it(increment: int, code: H2ErrorCode) -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.frames.take_window_update(1, increment)
    assert receiver.resets == [(1, code)]
    assert receiver.events[-1] == (StreamEvent.CLOSED, 1)


# ---- DATA -----------------------------------------------------------------------------------


def test_messages_are_found_however_they_are_cut_into_frames() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    octets = message(b"first") + message(b"second")
    receiver.data(1, octets[:3])
    assert receiver.events == [(StreamEvent.OPENED, 1)], "there is nothing to read yet"
    receiver.data(1, octets[3:12])
    assert receiver.events == [(StreamEvent.READABLE, 1)]
    receiver.data(1, octets[12:], flags=frames.END_STREAM)
    assert receiver.events == [(StreamEvent.READABLE, 1)]
    assert receiver.messages(1) == [b"first", b"second"]


def test_padding_is_dropped_but_counts_for_the_windows() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.data(1, message(b"abc"), flags=frames.PADDED, padding=10)
    assert receiver.messages(1) == [b"abc"]
    stream = receiver.streams.by_id[1]
    assert (stream.received_byte_size, stream.held_byte_size) == (8, 19)


def test_an_empty_frame_that_ends_the_stream_ends_the_request() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.data(1, b"", flags=frames.END_STREAM)
    assert receiver.streams.by_id[1].request_ended


@pytest.mark.parametrize(("byte_size", "padding"), [(1, 1), (4, 5), (0, 0)])
def test_more_padding_than_data_ends_the_connection(byte_size: int, padding: int) -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    with pytest.raises(ConnectionFailure) as caught:
        receiver.frames.begin_data(1, frames.PADDED, byte_size, padding)
    assert caught.value.code is H2ErrorCode.PROTOCOL_ERROR


def test_more_data_than_the_window_of_the_connection_ends_it() -> None:
    receiver = Receiver(100)
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.data(1, bytes(100))
    with pytest.raises(ConnectionFailure) as caught:
        receiver.data(1, b"x")
    assert caught.value.code is H2ErrorCode.FLOW_CONTROL_ERROR


def test_more_data_than_the_window_of_a_stream_resets_it() -> None:
    receiver = Receiver(2**30)
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.data(1, message(bytes(limits.STREAM_WINDOW_BYTE_SIZE - 5)))
    receiver.data(1, b"x")
    assert receiver.resets == [(1, H2ErrorCode.FLOW_CONTROL_ERROR)]


def test_data_of_a_closed_stream_is_dropped_and_given_back_to_the_connection() -> None:
    receiver = Receiver(100)
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.sending.reset(receiver.streams.by_id[1], H2ErrorCode.CANCEL)
    receiver.sending.write_queue.take()
    receiver.data(1, bytes(40))
    assert sent_frames(receiver.sending.write_queue) == [(frames.WINDOW_UPDATE, 0, 0, (40).to_bytes(4, "big"))]


def test_a_stream_that_is_closed_in_the_middle_of_a_frame_drops_the_rest_of_it() -> None:
    receiver = Receiver(100)
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.frames.begin_data(1, frames.END_STREAM, 40, 0)
    assert receiver.frames.take_data(memoryview(bytes(10))) == 10
    receiver.sending.reset(receiver.streams.by_id[1], H2ErrorCode.CANCEL)
    assert receiver.frames.take_data(memoryview(bytes(50))) == 30
    assert receiver.frames.unfinished is None
    assert receiver.events == [(StreamEvent.OPENED, 1)]


# ---- large messages -------------------------------------------------------------------------


def test_large_messages_are_received_where_they_belong() -> None:
    receiver = Receiver()
    content = bytes(range(256)) * 2**10
    octets = message(content)
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    assert receiver.frames.direct_buffer() is None, "no DATA is being received"
    receiver.frames.begin_data(1, 0, len(octets) - 9, 0)
    assert receiver.frames.direct_buffer() is None, "the size of the message is not known"
    assert receiver.frames.take_data(memoryview(octets[:2000])) == 2000
    buffer = receiver.frames.direct_buffer()
    assert buffer is not None
    assert len(buffer) == len(octets) - 2009, "not more than the frame has"
    buffer[:] = octets[2000:-9]
    receiver.frames.received_directly(len(buffer))
    assert receiver.frames.direct_buffer() is None
    receiver.data(1, octets[-9:], flags=frames.END_STREAM)
    assert receiver.messages(1) == [content]


def test_a_closed_stream_receives_nothing_directly() -> None:
    receiver = Receiver()
    receiver.frames.take_headers(1, HEAD, end_stream=False)
    receiver.frames.begin_data(1, 0, 200_000, 0)
    receiver.frames.take_data(memoryview(message(bytes(300_000))[:2000]))
    assert receiver.frames.direct_buffer() is not None
    receiver.sending.reset(receiver.streams.by_id[1], H2ErrorCode.CANCEL)
    assert receiver.frames.direct_buffer() is None


def test_a_flood_that_ends_with_a_direct_receive_ends_the_connection() -> None:
    receiver = Receiver()
    wrong_length = request_head([*FIELDS, ("content-length", "1")])
    for number in range(1000):
        receiver.frames.take_headers(2 * number + 1, wrong_length, end_stream=True)
    receiver.frames.take_headers(2001, wrong_length, end_stream=False)
    octets = message(bytes(100_000))
    receiver.frames.begin_data(2001, frames.END_STREAM, len(octets), 0)
    receiver.frames.take_data(memoryview(octets[:2000]))
    assert receiver.frames.direct_buffer() is not None
    receiver.frames.received_directly(len(octets) - 2000)
    assert receiver.sending.ended


# ---- memory ---------------------------------------------------------------------------------


def with_memory(limit: int) -> tuple[H2Connection, ByteBudget]:
    budget = ByteBudget(limit)
    connection = H2Connection(None, MessageMemory(budget, MemoryFull))
    feed(connection, CLIENT_PREFACE)
    connection.sending.write_queue.take()
    return connection, budget


def test_streams_with_headers_that_unfold_count_in_the_memory_budget_until_they_are_closed() -> None:
    connection, budget = with_memory(1 << 20)
    entry = b"\x40\x01x\x7f\xa1\x1e" + b"a" * 4000  # goes into the table: from then on one byte stands for it
    feed(connection, frame(frames.HEADERS, frames.END_HEADERS, 1, encode_block(FIELDS) + entry))
    number = 1
    while len(connection.streams.by_id) == (number + 1) // 2:
        number += 2
        more = encode_block([*FIELDS, ("number", str(number))]) + b"\xbe" * 3
        feed(connection, frame(frames.HEADERS, frames.END_HEADERS, number, more))
        assert number < 1000, "more headers were kept than there is memory for"
    assert 2 * 20 < number < 2 * 80
    assert budget.used_byte_size <= budget.limit_byte_size
    refused = [each for each in sent_frames(connection.sending.write_queue) if each[2] == number]
    assert [each[0] for each in refused] == [frames.HEADERS, frames.RST_STREAM]
    assert b"grpc-retry-pushback-ms" in refused[0][3]
    before = budget.used_byte_size
    feed(connection, frame(frames.RST_STREAM, 0, 3, bytes(4)))
    assert before - budget.used_byte_size > 12_000
    connection.sending.close()
    assert budget.used_byte_size == 0


def test_a_few_streams_are_opened_though_all_memory_is_in_use() -> None:
    connection, budget = with_memory(1000)
    for number in range(1, 2 * limits.ALWAYS_OPENED_STREAMS + 4, 2):
        feed(connection, request_headers(number))
    assert len(connection.streams.by_id) == limits.ALWAYS_OPENED_STREAMS
    assert budget.used_byte_size > 1000
    connection.sending.close()
    assert budget.used_byte_size == 0


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


#: A message that has memory of its own before it is complete, also where nobody chooses it.
HUGE = bytes(range(251)) * 9_000


def in_frames(number: int, content: bytes = HUGE, size: int = 2**14, flags: int = frames.END_STREAM) -> list[bytes]:
    """Return a message of a stream in frames of `size` bytes; `flags` are those of the last one."""
    octets = message(content)
    starts = range(0, len(octets), size)
    return [
        frame(frames.DATA, flags if start + size >= len(octets) else 0, number, octets[start : start + size])
        for start in starts
    ]


#: A part of it in a frame that has padding.
PADDED_PART = frame(frames.DATA, frames.PADDED, 3, b"\x03" + HUGE[:5_000] + bytes(3))

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
    "a large message in frames": request_headers(3) + b"".join(in_frames(3)) + call(5),
    "a large message in frames that do not end the stream": request_headers(3)
    + b"".join(in_frames(3, flags=0) + in_frames(3, flags=0)) + sent(3, flags=frames.END_STREAM),
    "large messages in frames of both": request_headers(3) + request_headers(5)
    + b"".join(one + other for one, other in zip(in_frames(3), in_frames(5), strict=True)),
    "other frames between those of a large message": request_headers(3) + (b"".join(in_frames(3)[:80])
    + frames.window_update(3, 5) + PADDED_PART + frame(frames.DATA, 0, 3) + frame(frames.DATA, 0, 3, b"x" * 9)
    + frame(frames.PING, 0, 0, bytes(8)) + call(5) + b"".join(in_frames(3)[80:100])),
    "a large message that is cut short": request_headers(3) + b"".join(in_frames(3)[:100])
    + frame(frames.DATA, frames.END_STREAM, 3),
    "a large message that is reset": request_headers(3) + b"".join(in_frames(3)[:100])
    + frame(frames.RST_STREAM, 0, 3, bytes(4)) + b"".join(in_frames(3)[100:]),
    "a large message beyond the stream's window": request_headers(3)
    + sent(3, bytes(60_000)) * (limits.STREAM_WINDOW_BYTE_SIZE // 60_000 - 20) + b"".join(in_frames(3)),
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


def test_frames_of_a_large_message_are_taken_in_one_step_up_to_its_last() -> None:
    connection = fed(request_headers(3) + b"".join(in_frames(3)[:80]), 2**16)
    octets = b"".join(in_frames(3)[80:])
    # One step for all frames but the last, one for the start of the last, one for its rest.
    taken = connection.receiving.receive(memoryview(octets), 0, max_frames=1)
    assert taken == len(octets) - len(in_frames(3)[-1])
    assert connection.receiving.has_more
    connection.receiving.receive(memoryview(octets[taken:]), 0)
    assert messages(connection.streams.by_id[3]) == [HUGE]


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
