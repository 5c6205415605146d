"""The tables of states: what the parts of a connection do in each state, for each frame, is what the tables say."""

import pytest

from protocols.grpc.h2 import frames
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode
from protocols.grpc.h2.headers import OK_TRAILERS, RESPONSE_BLOCK, encode_block
from protocols.grpc.h2.states import (
    STREAM_STATES,
    STREAM_STATES_SENDING,
    ClientFrame,
    ConnectionMistake,
    ConnectionState,
    ServerFrame,
    StreamMistake,
    StreamState,
    check_frame_header,
    connection_state_after,
)
from protocols.grpc.h2.streams import Stream
from tests.protocols.grpc.h2.client_frames import (
    CLIENT_PREFACE,
    END_BOTH,
    FIELDS,
    failure,
    feed,
    frame,
    message,
    open_connection,
    request_headers,
    resets,
    sent_frames,
)

# ---- streams --------------------------------------------------------------------------------

STREAM = 3


def bring_to(state: StreamState, connection: H2Connection) -> None:
    """Bring stream 3 into a state."""
    if state is StreamState.IDLE:
        return
    feed(connection, request_headers(STREAM, flags=END_BOTH if state is StreamState.HALF_CLOSED_REMOTE else 4))
    if state is StreamState.CLOSED:
        feed(connection, frames.rst_stream(STREAM, H2ErrorCode.CANCEL))
    elif state is StreamState.RESET:
        connection.sending.reset(connection.streams.by_id[STREAM], H2ErrorCode.CANCEL)


CLIENT_FRAMES: dict[ClientFrame, bytes] = {
    ClientFrame.HEADERS: request_headers(STREAM),
    ClientFrame.HEADERS_END_STREAM: request_headers(STREAM, flags=END_BOTH),
    ClientFrame.DATA: frame(frames.DATA, 0, STREAM, b"\0\0"),
    ClientFrame.DATA_END_STREAM: frame(frames.DATA, frames.END_STREAM, STREAM, b"\0\0"),
    ClientFrame.RST_STREAM: frames.rst_stream(STREAM, H2ErrorCode.CANCEL),
    ClientFrame.WINDOW_UPDATE: frames.window_update(STREAM, 1),
}

#: The same frames, with messages that the short path for complete frames takes.
COMPLETE_CLIENT_FRAMES = CLIENT_FRAMES | {
    ClientFrame.DATA: frame(frames.DATA, 0, STREAM, message(b"abc")),
    ClientFrame.DATA_END_STREAM: frame(frames.DATA, frames.END_STREAM, STREAM, message(b"abc")),
}


def in_state(state: StreamState) -> H2Connection:
    connection = open_connection()
    bring_to(state, connection)
    connection.sending.write_queue.take()
    assert connection.streams.state_of(STREAM) is state
    return connection


def test_the_table_of_streams_has_a_line_for_every_state_and_every_frame_of_a_client() -> None:
    assert STREAM_STATES.keys() == set(StreamState)
    assert all(outcomes.keys() == set(ClientFrame) for outcomes in STREAM_STATES.values())


def test_the_server_sends_on_open_streams_only() -> None:
    assert STREAM_STATES_SENDING.keys() == {StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE}
    assert all(outcomes.keys() == set(ServerFrame) for outcomes in STREAM_STATES_SENDING.values())


@pytest.mark.parametrize("by_frame", [CLIENT_FRAMES, COMPLETE_CLIENT_FRAMES], ids=["frame by frame", "complete"])
@pytest.mark.parametrize("client_frame", ClientFrame, ids=lambda frame: frame.name)
@pytest.mark.parametrize("state", StreamState, ids=lambda state: state.name)
def test_a_frame_of_a_client_does_what_the_table_says(
    state: StreamState, client_frame: ClientFrame, by_frame: dict[ClientFrame, bytes]
) -> None:
    connection = in_state(state)
    feed(connection, by_frame[client_frame])
    outcome = STREAM_STATES[state][client_frame]
    if isinstance(outcome, ConnectionMistake):
        assert failure(connection) is outcome.code
        return
    assert not connection.sending.ended
    if isinstance(outcome, StreamMistake):
        assert resets(connection.sending.write_queue) == [(STREAM, outcome.code)]
        assert connection.streams.state_of(STREAM) is StreamState.RESET
    else:
        assert resets(connection.sending.write_queue) == []
        assert connection.streams.state_of(STREAM) is outcome


def test_a_complete_call_leaves_its_stream_as_headers_and_the_end_of_data_do() -> None:
    connection = open_connection()
    call = request_headers(1) + frame(frames.DATA, frames.END_STREAM, 1, message(bytes(64)))
    feed(connection, call)
    feed(connection, call.replace(b"\0\0\0\1", b"\0\0\0\3"))  # its headers are known now
    by_headers = STREAM_STATES[StreamState.IDLE][ClientFrame.HEADERS]
    assert isinstance(by_headers, StreamState)
    assert connection.streams.by_id[3].complete_message == bytes(64), "it was not taken in one step"
    assert connection.streams.state_of(3) is STREAM_STATES[by_headers][ClientFrame.DATA_END_STREAM]


def test_a_request_on_an_id_of_the_server_ends_the_connection() -> None:
    connection = open_connection()
    feed(connection, request_headers(2))
    assert failure(connection) is H2ErrorCode.PROTOCOL_ERROR


def send(connection: H2Connection, stream: Stream, server_frame: ServerFrame) -> None:
    sending = connection.sending
    match server_frame:
        case ServerFrame.HEADERS:
            sending.send_headers(stream, RESPONSE_BLOCK)
        case ServerFrame.DATA:
            sending.send_data(stream, [message(b"abc")])
            sending.pump(1000)
        case ServerFrame.HEADERS_END_STREAM:
            sending.send_trailers(stream, OK_TRAILERS)
        case ServerFrame.RST_STREAM:
            sending.reset(stream, H2ErrorCode.CANCEL)


@pytest.mark.parametrize("server_frame", ServerFrame, ids=lambda frame: frame.name)
@pytest.mark.parametrize("state", STREAM_STATES_SENDING, ids=lambda state: state.name)
def test_a_frame_of_the_server_does_what_the_table_says(state: StreamState, server_frame: ServerFrame) -> None:
    connection = in_state(state)
    send(connection, connection.streams.by_id[STREAM], server_frame)
    assert connection.streams.state_of(STREAM) is STREAM_STATES_SENDING[state][server_frame]


@pytest.mark.parametrize("state", STREAM_STATES_SENDING, ids=lambda state: state.name)
@pytest.mark.parametrize("byte_size", [3, 100_000])
def test_a_response_in_one_piece_ends_its_stream_as_trailers_do(state: StreamState, byte_size: int) -> None:
    connection = in_state(state)
    feed(connection, frames.window_update(0, 2**20) + frames.window_update(STREAM, 2**20))
    connection.sending.respond(connection.streams.by_id[STREAM], [bytes(byte_size)])
    connection.sending.pump(2**20)
    assert connection.streams.state_of(STREAM) is STREAM_STATES_SENDING[state][ServerFrame.HEADERS_END_STREAM]
    kinds = [frame_type for frame_type, *_ in sent_frames(connection.sending.write_queue)]
    assert kinds.count(frames.RST_STREAM) == (state is StreamState.OPEN)


@pytest.mark.parametrize("server_frame", ServerFrame, ids=lambda frame: frame.name)
def test_nothing_can_be_sent_on_a_closed_stream(server_frame: ServerFrame) -> None:
    connection = in_state(StreamState.OPEN)
    stream = connection.streams.by_id[STREAM]
    connection.sending.reset(stream, H2ErrorCode.CANCEL)
    with pytest.raises((AssertionError, KeyError)):
        send(connection, stream, server_frame)


# ---- the connection -------------------------------------------------------------------------

SETTINGS = (frames.SETTINGS, 0)
SETTINGS_ACK = (frames.SETTINGS, frames.ACK)
HEADERS = (frames.HEADERS, frames.END_HEADERS)
HEADERS_WITHOUT_END = (frames.HEADERS, 0)
CONTINUATION = (frames.CONTINUATION, frames.END_HEADERS)
CONTINUATION_WITHOUT_END = (frames.CONTINUATION, 0)
OTHERS = [
    (frame_type, 0)
    for frame_type in (
        frames.DATA, frames.PRIORITY, frames.RST_STREAM, frames.PING, frames.GOAWAY, frames.WINDOW_UPDATE, 0x42,
    )
]  # fmt: skip
ALL = [SETTINGS, SETTINGS_ACK, HEADERS, HEADERS_WITHOUT_END, CONTINUATION, CONTINUATION_WITHOUT_END, *OTHERS]

#: What is allowed in each state of a connection, and the state behind it; all else ends the connection.
ALLOWED = {
    ConnectionState.AWAITING_SETTINGS: {SETTINGS: ConnectionState.OPEN},
    ConnectionState.OPEN: {
        SETTINGS: ConnectionState.OPEN,
        SETTINGS_ACK: ConnectionState.OPEN,
        HEADERS: ConnectionState.OPEN,
        HEADERS_WITHOUT_END: ConnectionState.IN_HEADER_BLOCK,
        **dict.fromkeys(OTHERS, ConnectionState.OPEN),
    },
    ConnectionState.IN_HEADER_BLOCK: {
        CONTINUATION: ConnectionState.OPEN,
        CONTINUATION_WITHOUT_END: ConnectionState.IN_HEADER_BLOCK,
    },
}


@pytest.mark.parametrize("of_frame", ALL)
@pytest.mark.parametrize("state", ALLOWED, ids=lambda state: state.name)
def test_only_some_frames_are_allowed_in_a_state_of_the_connection(
    state: ConnectionState, of_frame: tuple[int, int]
) -> None:
    expected = ALLOWED[state].get(of_frame)
    if expected is not None:
        assert connection_state_after(state, *of_frame) is expected
    else:
        with pytest.raises(ConnectionFailure) as caught:
            connection_state_after(state, *of_frame)
        assert caught.value.code is H2ErrorCode.PROTOCOL_ERROR


def test_a_connection_goes_through_its_states() -> None:
    block = encode_block(FIELDS)
    connection = H2Connection()
    states = []
    for octets in (
        b"",
        frames.PREFACE[:5],
        frames.PREFACE[5:],
        frames.settings([]),
        frame(frames.HEADERS, 0, 1, block[:9]),
        frame(frames.CONTINUATION, 0, 1, block[9:20]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:]),
        frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1),
    ):
        # What was not taken of the preface comes again.
        again = frames.PREFACE[:5] if octets == frames.PREFACE[5:] else b""
        feed(connection, again + octets)
        states.append(connection.receiving.state)
    assert states == [
        ConnectionState.AWAITING_PREFACE,
        ConnectionState.AWAITING_PREFACE,
        ConnectionState.AWAITING_SETTINGS,
        ConnectionState.OPEN,
        ConnectionState.IN_HEADER_BLOCK,
        ConnectionState.IN_HEADER_BLOCK,
        ConnectionState.OPEN,
        ConnectionState.CLOSED,
    ]


def test_a_connection_that_the_server_has_ended_looks_at_nothing_more() -> None:
    connection = open_connection()
    connection.sending.fail(H2ErrorCode.NO_ERROR)
    sent_frames(connection.sending.write_queue)
    assert connection.receiving.state is ConnectionState.CLOSED
    feed(connection, request_headers(1) + b"no frame at all" + CLIENT_PREFACE)
    assert connection.streams.by_id == {}
    assert sent_frames(connection.sending.write_queue) == []


# ---- the frame header -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame_type", "stream_id", "byte_size"),
    [
        (frames.DATA, 1, 2**21),
        (frames.HEADERS, 1, 16_000),
        (frames.PRIORITY, 1, 5),
        (frames.RST_STREAM, 1, 4),
        (frames.SETTINGS, 0, 12),
        (frames.PING, 0, 8),
        (frames.GOAWAY, 0, 100),
        (frames.WINDOW_UPDATE, 0, 4),
        (frames.WINDOW_UPDATE, 1, 4),
        (0x42, 0, 1000),
        (0x42, 1, 1000),
    ],
)
def test_correct_frame_headers_are_allowed(frame_type: int, stream_id: int, byte_size: int) -> None:
    check_frame_header(frame_type, 0, stream_id, byte_size)


@pytest.mark.parametrize(
    ("frame_type", "flags", "stream_id", "byte_size", "code"),
    [
        (frames.DATA, 0, 1, 2**21 + 1, H2ErrorCode.FRAME_SIZE_ERROR),
        (frames.DATA, 0, 0, 1, H2ErrorCode.PROTOCOL_ERROR),
        (frames.HEADERS, 0, 0, 1, H2ErrorCode.PROTOCOL_ERROR),
        (frames.HEADERS, 0, 1, 17_000, H2ErrorCode.ENHANCE_YOUR_CALM),
        (frames.PRIORITY, 0, 1, 4, H2ErrorCode.FRAME_SIZE_ERROR),
        (frames.RST_STREAM, 0, 1, 5, H2ErrorCode.FRAME_SIZE_ERROR),
        (frames.RST_STREAM, 0, 0, 4, H2ErrorCode.PROTOCOL_ERROR),
        (frames.SETTINGS, 0, 1, 0, H2ErrorCode.PROTOCOL_ERROR),
        (frames.SETTINGS, 0, 0, 5, H2ErrorCode.FRAME_SIZE_ERROR),
        (frames.SETTINGS, frames.ACK, 0, 6, H2ErrorCode.FRAME_SIZE_ERROR),
        (frames.SETTINGS, 0, 0, 33 * 6, H2ErrorCode.ENHANCE_YOUR_CALM),
        (frames.PUSH_PROMISE, 0, 1, 4, H2ErrorCode.PROTOCOL_ERROR),
        (frames.PING, 0, 0, 7, H2ErrorCode.FRAME_SIZE_ERROR),
        (frames.PING, 0, 1, 8, H2ErrorCode.PROTOCOL_ERROR),
        (frames.GOAWAY, 0, 1, 8, H2ErrorCode.PROTOCOL_ERROR),
        (frames.WINDOW_UPDATE, 0, 0, 3, H2ErrorCode.FRAME_SIZE_ERROR),
        (frames.CONTINUATION, 0, 0, 1, H2ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_wrong_frame_headers_end_the_connection(
    frame_type: int, flags: int, stream_id: int, byte_size: int, code: H2ErrorCode
) -> None:
    with pytest.raises(ConnectionFailure) as caught:
        check_frame_header(frame_type, flags, stream_id, byte_size)
    assert caught.value.code is code
