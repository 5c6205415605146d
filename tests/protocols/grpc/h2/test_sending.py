"""The sending half: responses within the client's windows, in the order of writing, and what is given back when."""

from typing import Any

import pytest

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import H2ErrorCode
from protocols.grpc.h2.headers import (
    OK_TRAILERS,
    OK_TRAILERS_BLOCK,
    RESPONSE_BLOCK,
    Trailers,
    request_head,
    status_trailers,
)
from protocols.grpc.h2.sending import SendingHalf, WriteQueue
from protocols.grpc.h2.states import StreamState
from protocols.grpc.h2.streams import PeerLimits, ReceiveWindow, Stream, StreamEvent, Streams
from protocols.request_limits import COPIED_RESPONSE_BYTE_SIZE
from tests.protocols.grpc.h2.client_frames import END_BOTH, FIELDS, message, resets, sent_frames, take_events

SECOND = 10**9


class Sender:
    """A sending half that has sent its preface, with what it shares."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.peer = PeerLimits()
        self.receive_window = ReceiveWindow(100)
        self.half = SendingHalf(self.streams, self.peer, self.receive_window)
        self.half.write_queue.take()
        self.log: list[Any] = []

    def open(self, stream_id: int, send_window: int = 2**30, *, request_ended: bool = True) -> Stream:
        state = StreamState.HALF_CLOSED_REMOTE if request_ended else StreamState.OPEN
        stream = self.streams.by_id[stream_id] = Stream(stream_id, request_head(FIELDS), send_window, state)
        self.streams.last_id = stream_id
        return stream

    def release(self) -> None:
        self.log.append("released")

    def written(self) -> list[Any]:
        """Do what the transport does when it has written everything; returns what was released so far."""
        for release in self.half.releases:
            release()
        self.half.releases.clear()
        return self.log

    @property
    def sent(self) -> list[tuple[int, int, int, bytes]]:
        return sent_frames(self.half.write_queue)


# ---- the order of writing -------------------------------------------------------------------


def test_a_queue_returns_what_was_put_in_its_order() -> None:
    queue = WriteQueue()
    queue.put(b"a")
    queue.put_pieces([b"bc", memoryview(b"d")], 3)
    assert queue.byte_size == 4
    assert [bytes(piece) for piece in queue.take()] == [b"a", b"bc", b"d"]
    assert queue.byte_size == 0
    assert queue.take() == []


def test_a_queue_counts_what_was_sent_without_pings_and_acknowledgements() -> None:
    queue = WriteQueue()
    queue.put(b"12345")
    queue.put_control(b"ping")
    assert queue.sent_byte_size == 5
    queue.take()
    queue.put(b"6")
    assert queue.sent_byte_size == 6


def test_the_first_frames_are_settings_and_the_window_of_the_connection() -> None:
    half = SendingHalf(Streams(), PeerLimits(), ReceiveWindow(100))
    settings, window = sent_frames(half.write_queue)
    assert settings[:3] == (frames.SETTINGS, 0, 0)
    assert dict(frames.settings_entries(memoryview(settings[3]))) == {
        frames.Setting.MAX_CONCURRENT_STREAMS: limits.MAX_CONCURRENT_STREAMS,
        frames.Setting.INITIAL_WINDOW_SIZE: limits.STREAM_WINDOW_BYTE_SIZE,
        frames.Setting.MAX_FRAME_SIZE: limits.MAX_FRAME_BYTE_SIZE,
        frames.Setting.MAX_HEADER_LIST_SIZE: limits.MAX_HEADER_LIST_BYTE_SIZE,
    }
    increment = limits.CONNECTION_WINDOW_BYTE_SIZE - frames.DEFAULT_WINDOW_BYTE_SIZE
    assert window == (frames.WINDOW_UPDATE, 0, 0, increment.to_bytes(4, "big"))


# ---- responses ------------------------------------------------------------------------------


def test_a_small_response_is_one_piece_and_released_at_once() -> None:
    sender = Sender()
    stream = sender.open(1)
    sender.half.respond(stream, [b"resp", memoryview(b"onse")], sender.release)
    assert sender.log == ["released"]
    [piece] = sender.half.write_queue.take()
    sender.half.write_queue.put(piece)
    assert sender.sent == [
        (frames.HEADERS, frames.END_HEADERS, 1, RESPONSE_BLOCK),
        (frames.DATA, 0, 1, message(b"response")),
        (frames.HEADERS, END_BOTH, 1, OK_TRAILERS_BLOCK),
    ]
    assert not stream.is_open
    assert sender.streams.by_id == {}
    assert sender.peer.send_window == frames.DEFAULT_WINDOW_BYTE_SIZE - len(message(b"response"))


def test_a_large_response_is_not_copied_and_released_when_it_was_written() -> None:
    sender = Sender()
    sender.peer.send_window = sender.peer.max_frame_byte_size = 2**20
    memory = bytearray(COPIED_RESPONSE_BYTE_SIZE + 1)
    sender.half.respond(sender.open(1), [memory], sender.release)
    assert sender.log == []
    memory[:3] = b"abc"
    assert sender.sent[1][3] == message(bytes(memory))
    assert sender.written() == ["released"]


@pytest.mark.parametrize(("of_stream", "of_connection"), [(9, 100), (100, 9)])
def test_a_response_larger_than_a_window_leaves_as_the_window_opens(of_stream: int, of_connection: int) -> None:
    sender = Sender()
    stream = sender.open(1, send_window=of_stream)
    sender.peer.send_window = of_connection
    sender.half.respond(stream, [b"abcdefg"], sender.release)
    assert not sender.half.pump(2**20), "no more can be sent now"
    assert sender.sent[1:] == [(frames.DATA, 0, 1, message(b"abcdefg")[:9])]
    assert stream.is_open
    stream.send_window = sender.peer.send_window = 100
    sender.half.pump(2**20)
    assert sender.sent == [
        (frames.DATA, 0, 1, message(b"abcdefg")[9:]),
        (frames.HEADERS, END_BOTH, 1, OK_TRAILERS_BLOCK),
    ]
    assert not stream.is_open
    assert sender.written() == ["released"]


def test_a_response_larger_than_a_frame_leaves_in_several() -> None:
    sender = Sender()
    stream = sender.open(1)
    sender.peer.max_frame_byte_size = len(RESPONSE_BLOCK)
    content = bytes(2 * len(RESPONSE_BLOCK))
    sender.half.respond(stream, [content])
    sender.half.pump(2**20)
    data = [payload for frame_type, *_, payload in sender.sent if frame_type == frames.DATA]
    assert [len(payload) for payload in data] == [len(RESPONSE_BLOCK), len(RESPONSE_BLOCK), 5]
    assert b"".join(data) == message(content)
    assert not stream.is_open


def test_responses_that_wait_send_one_frame_each_in_turn() -> None:
    sender = Sender()
    sender.peer.send_window, sender.peer.max_frame_byte_size = 2**20, 100
    for stream_id in (1, 3):
        sender.half.respond(sender.open(stream_id), [bytes(250)])
    sender.half.pump(2**20)
    data = [(stream_id, len(payload)) for frame_type, _, stream_id, payload in sender.sent if frame_type == frames.DATA]
    assert data == [(1, 100), (3, 100), (1, 100), (3, 100), (1, 55), (3, 55)]


def test_pumping_stops_when_enough_is_in_the_queue_and_says_that_there_is_more() -> None:
    sender = Sender()
    sender.peer.send_window, sender.peer.max_frame_byte_size = 2**20, 100
    sender.half.respond(sender.open(1), [bytes(950)])
    sender.half.write_queue.take()
    assert sender.half.pump(300)
    assert 300 <= sender.half.write_queue.byte_size < 500
    sender.half.write_queue.take()
    assert not sender.half.pump(2**20)


def test_a_response_that_waits_alone_leaves_in_full_frames_over_the_borders_of_its_parts() -> None:
    sender = Sender()
    sender.peer.send_window, sender.peer.max_frame_byte_size = 2**20, 100
    parts = [bytes([number]) * size for number, size in enumerate((10, 0, 300, 90, 5))]
    sender.half.respond(sender.open(1), parts)
    sender.half.pump(2**20)
    data = [payload for frame_type, *_, payload in sender.sent if frame_type == frames.DATA]
    assert [len(payload) for payload in data] == [100, 100, 100, 100, 10]
    assert b"".join(data) == message(b"".join(parts))


def test_a_response_that_waits_alone_keeps_to_the_windows_of_stream_and_connection() -> None:
    for of_stream, of_connection in ((250, 2**20), (2**20, 250)):
        sender = Sender()
        sender.peer.max_frame_byte_size = 100
        stream = sender.open(1)
        stream.send_window, sender.peer.send_window = of_stream, of_connection
        sender.half.respond(stream, [bytes(1000)])
        assert not sender.half.pump(2**20)
        data = [len(payload) for frame_type, *_, payload in sender.sent if frame_type == frames.DATA]
        assert data == [100, 100, 50]
        assert (stream.send_window, sender.peer.send_window) == (of_stream - 250, of_connection - 250)


def test_a_full_queue_makes_even_small_responses_wait() -> None:
    sender = Sender()
    sender.half.write_queue.put(bytes(2**20))
    stream = sender.open(1)
    sender.half.respond(stream, [b"abc"])
    assert stream.is_open
    sender.half.write_queue.take()
    sender.half.pump(2**20)
    assert not stream.is_open


def test_a_response_without_a_message_is_headers_alone() -> None:
    sender = Sender()
    stream = sender.open(1)
    sender.half.send_trailers(stream, status_trailers(5, "no"))
    assert sender.sent == [(frames.HEADERS, END_BOTH, 1, status_trailers(5, "no").block)]


def test_headers_too_large_for_a_frame_are_continued() -> None:
    sender = Sender()
    sender.half.send_trailers(sender.open(1), Trailers(RESPONSE_BLOCK + bytes(2**15), 0))
    assert [(frame_type, flags) for frame_type, flags, *_ in sender.sent] == [(1, 1), (9, 0), (9, 4)]


def test_a_client_that_is_still_sending_is_told_that_it_need_not() -> None:
    sender = Sender()
    sender.half.respond(sender.open(1, request_ended=False), [b"abc"])
    assert resets(sender.half.write_queue) == [(1, H2ErrorCode.NO_ERROR)]
    assert sender.streams.state_of(1) is StreamState.RESET


# ---- messages of streams --------------------------------------------------------------------


def test_a_message_that_fits_leaves_at_once() -> None:
    sender = Sender()
    stream = sender.open(1, send_window=100)
    assert sender.half.send_message(stream, [b"abc", b"def"], sender.release)
    assert sender.log == ["released"]
    assert sender.sent == [(frames.DATA, 0, 1, message(b"abcdef"))]
    assert stream.send_window == 100 - 11
    assert take_events(sender.streams) == []


def test_a_message_that_waits_is_an_event_when_it_has_left() -> None:
    sender = Sender()
    stream = sender.open(1, send_window=4)
    assert not sender.half.send_message(stream, [b"abc"], sender.release)
    sender.half.pump(2**20)
    assert take_events(sender.streams) == []
    stream.send_window = 100
    sender.half.pump(2**20)
    assert take_events(sender.streams) == [(StreamEvent.DATA_SENT, 1)]
    assert b"".join(payload for *_, payload in sender.sent) == message(b"abc")
    assert sender.log == []
    assert sender.written() == ["released"]


def test_data_that_is_dropped_makes_way_for_the_trailers() -> None:
    sender = Sender()
    stream = sender.open(1, send_window=3)
    sender.half.send_headers(stream, RESPONSE_BLOCK)
    sender.half.send_data(stream, [message(b"abc")], sender.release)
    sender.half.pump(2**20)
    sender.half.write_queue.take()
    sender.half.drop_data(stream)
    assert sender.log == [], "what was taken may not have been written yet"
    assert sender.written() == ["released"]
    sender.half.send_trailers(stream, OK_TRAILERS)
    assert sender.sent == [(frames.HEADERS, END_BOTH, 1, OK_TRAILERS_BLOCK)]


def test_a_stream_that_is_closed_gives_back_what_it_holds() -> None:
    sender = Sender()
    stream = sender.open(1, send_window=0)
    stream.held_byte_size = 30
    assert sender.receive_window.take(100)
    sender.half.respond(stream, [b"abc"], sender.release)
    sender.half.write_queue.take()
    sender.half.reset(stream, H2ErrorCode.CANCEL)
    assert sender.half.waiting == {}
    assert sender.sent == [
        (frames.WINDOW_UPDATE, 0, 0, (30).to_bytes(4, "big")),
        (frames.RST_STREAM, 0, 1, bytes([0, 0, 0, H2ErrorCode.CANCEL])),
    ]
    assert sender.written() == ["released"]


# ---- the client's windows to send -----------------------------------------------------------


def test_windows_open_when_all_complete_messages_were_taken() -> None:
    sender = Sender()
    stream = sender.open(1, request_ended=False)
    assert sender.receive_window.take(100)
    stream.held_byte_size = 40
    stream.message_reader.messages.append(b"message")
    sender.half.consumed(stream)
    assert sender.sent == []
    stream.message_reader.messages.clear()
    sender.half.consumed(stream)
    assert sender.sent == [(frames.WINDOW_UPDATE, 0, 0, (40).to_bytes(4, "big"))], "the stream's has room for long"
    assert stream.held_byte_size == 0


def test_the_window_of_a_stream_opens_as_long_as_its_client_sends() -> None:
    sender = Sender()
    portion = limits.STREAM_WINDOW_BYTE_SIZE // 4
    for stream_id, request_ended in ((1, False), (3, True)):
        stream = sender.open(stream_id, request_ended=request_ended)
        stream.held_byte_size = portion
        sender.half.consumed(stream)
    updated = [stream_id for frame_type, _, stream_id, _ in sender.sent if frame_type == frames.WINDOW_UPDATE]
    assert updated == [0, 1, 0]


# ---- streams and connections that end -------------------------------------------------------


def test_a_stream_that_makes_no_progress_is_reset() -> None:
    sender = Sender()
    stream = sender.open(1, send_window=0)
    sender.half.respond(stream, [b"abc"])
    sender.half.reset_stalled(0)
    sender.half.reset_stalled(limits.PROGRESS_TIMEOUT_S * SECOND - 1)
    assert stream.is_open
    sender.half.reset_stalled(limits.PROGRESS_TIMEOUT_S * SECOND)
    assert resets(sender.half.write_queue) == [(1, H2ErrorCode.CANCEL)]
    assert take_events(sender.streams) == [(StreamEvent.CLOSED, 1)]


def test_a_graceful_end_names_the_highest_id_and_goes_on() -> None:
    sender = Sender()
    sender.half.go_away("max_age")
    assert sender.sent == [(frames.GOAWAY, 0, 0, bytes.fromhex("7fffffff00000000") + b"max_age")]
    assert not sender.half.ended


def test_a_connection_error_closes_all_streams_and_goaway_is_the_last_frame() -> None:
    sender = Sender()
    for stream_id in (1, 3):
        sender.open(stream_id).held_byte_size = 50
    assert sender.receive_window.take(100)
    sender.half.fail(H2ErrorCode.PROTOCOL_ERROR, "why")
    sender.half.fail(H2ErrorCode.NO_ERROR)
    assert sender.sent == [(frames.GOAWAY, 0, 0, bytes([0, 0, 0, 3, 0, 0, 0, 1]) + b"why")]
    assert sender.half.ended
    assert sender.streams.by_id == {}
    assert take_events(sender.streams) == [(StreamEvent.CLOSED, 1), (StreamEvent.CLOSED, 3)]


def test_a_connection_that_is_gone_sends_nothing() -> None:
    sender = Sender()
    sender.open(1)
    sender.half.close()
    assert sender.half.ended
    assert sender.sent == []
    assert take_events(sender.streams) == [(StreamEvent.CLOSED, 1)]
