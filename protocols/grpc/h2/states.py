"""Which frames a client may send in which state, and what may be sent to it: RFC 9113 as tables. Pure.

A frame of the client is checked in three steps; each one raises `ConnectionFailure` (5.4.1) or names a stream error
(5.4.2) for what is not allowed:

1. by the state of the connection: `connection_state_after`;
2. by its frame header alone, in every state (4.2 and 6): `check_frame_header`;
3. by the state of its stream: `STREAM_STATES`.

The connection::

                       preface                   SETTINGS            HEADERS without END_HEADERS
    AWAITING_PREFACE ----------> AWAITING_SETTINGS -------> OPEN ---------------------------------> IN_HEADER_BLOCK
                                                             ^                                            |
                                                             +------- CONTINUATION with END_HEADERS ------+

    from every state to CLOSED: a connection error, the server's end of the connection, or the loss of its socket

A stream (5.1)::

                     HEADERS                         END_STREAM                           END_STREAM is sent
    IDLE ------------------------------> OPEN ----------------------> HALF_CLOSED_REMOTE --------------------> CLOSED
      |                                   |                                ^   |
      +---- HEADERS with END_STREAM ------|--------------------------------+   |
                                          |                                    |
                                          +---- END_STREAM is sent (NO_ERROR   +---- RST_STREAM is sent
                                          |     follows), RST_STREAM is sent   |
                                          v                                    v
                                        RESET <--------------------------------+

    RST_STREAM of the client: from OPEN and HALF_CLOSED_REMOTE to CLOSED

"Half-closed (local)" of the RFC does not last here: a server that has sent its response resets a request that is
still being sent in the same step (8.1). RESET is the RFC's "closed" for a short time, in which the client may not
have received the server's RST_STREAM, so that its frames are ignored. The states "reserved" belong to pushed streams.

The usual sequences of frames do not look the tables up (the last methods of `stream_frames.py`, and most of
`sending.py`); the tests compare what they do with the tables.
"""

from __future__ import annotations

import enum

import msgspec

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode

# ---- the connection -------------------------------------------------------------------------


class ConnectionState(enum.Enum):
    """What the client may send next."""

    #: The 24 bytes of the preface.
    AWAITING_PREFACE = enum.auto()
    #: SETTINGS, and no acknowledgement of SETTINGS.
    AWAITING_SETTINGS = enum.auto()
    #: Every frame but CONTINUATION.
    OPEN = enum.auto()
    #: CONTINUATION of the same stream.
    IN_HEADER_BLOCK = enum.auto()
    #: Nothing: it is not looked at.
    CLOSED = enum.auto()


def connection_state_after(state: ConnectionState, frame_type: int, flags: int) -> ConnectionState:
    """Return the state of a connection behind a frame of the client. Raises `ConnectionFailure`.

    Neither the preface nor the end of the connection is a frame: `state` is none of these two.
    """
    ends_headers = flags & frames.END_HEADERS
    if state is _IN_HEADER_BLOCK:
        if frame_type != frames.CONTINUATION:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "a header block was not continued")
        return _OPEN if ends_headers else _IN_HEADER_BLOCK
    if state is _AWAITING_SETTINGS and (frame_type != frames.SETTINGS or flags & frames.ACK):
        raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
    if frame_type == frames.CONTINUATION:
        raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block")
    if frame_type == frames.HEADERS and not ends_headers:
        return _IN_HEADER_BLOCK
    return _OPEN


# Python 3.11 finds a name of a module in 5 ns and a member of an enum in 70 ns, which is much for every frame.
_AWAITING_SETTINGS = ConnectionState.AWAITING_SETTINGS
_OPEN = ConnectionState.OPEN
_IN_HEADER_BLOCK = ConnectionState.IN_HEADER_BLOCK


# ---- the frame header -----------------------------------------------------------------------

#: Padding and priority add to a header block.
_MAX_HEADERS_PAYLOAD = limits.MAX_HEADER_BLOCK_BYTE_SIZE + 256 + 5

#: The largest frame that is not DATA, with its frame header: the receiver of a connection must have room for it.
MAX_CONTROL_FRAME_BYTE_SIZE = frames.FRAME_HEADER_BYTE_SIZE + _MAX_HEADERS_PAYLOAD

_FIXED_SIZES = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_ON_STREAMS = {frames.DATA, frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION}
_ON_CONNECTION = {frames.SETTINGS, frames.PING, frames.GOAWAY}


def check_frame_header(frame_type: int, flags: int, stream_id: int, byte_size: int) -> None:
    """Check a frame with a payload of `byte_size` bytes. Raises `ConnectionFailure`."""
    if byte_size > limits.MAX_FRAME_BYTE_SIZE:
        raise ConnectionFailure(H2ErrorCode.FRAME_SIZE_ERROR, f"a frame of {byte_size} bytes")
    if frame_type == frames.DATA and stream_id:  # usual
        return
    if (stream_id == 0 and frame_type in _ON_STREAMS) or (stream_id and frame_type in _ON_CONNECTION):
        raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"a frame of type {frame_type} on stream {stream_id}")
    if frame_type == frames.PUSH_PROMISE:
        raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
    if frame_type in _FIXED_SIZES and byte_size != _FIXED_SIZES[frame_type]:
        raise ConnectionFailure(H2ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {frame_type} with {byte_size} bytes")
    if frame_type == frames.SETTINGS:
        if byte_size % frames.SETTING_BYTE_SIZE or (byte_size and flags & frames.ACK):
            raise ConnectionFailure(H2ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {byte_size} bytes")
        if byte_size > limits.MAX_SETTINGS_ENTRIES * frames.SETTING_BYTE_SIZE:
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "too many entries in SETTINGS")
    elif byte_size > _MAX_HEADERS_PAYLOAD and frame_type in (frames.HEADERS, frames.CONTINUATION):
        raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")


# ---- streams --------------------------------------------------------------------------------


class StreamState(enum.IntEnum):
    """How far a stream is; an integer, because that is what a dictionary finds fast."""

    #: No frame of it was received.
    IDLE = enum.auto()
    #: The client is sending its request.
    OPEN = enum.auto()
    #: The client has sent its request.
    HALF_CLOSED_REMOTE = enum.auto()
    #: Closed, by both sides or by the client.
    CLOSED = enum.auto()
    #: Closed by the server's RST_STREAM, which the client may not have received.
    RESET = enum.auto()


class ClientFrame(enum.IntEnum):
    """What a client sends on a stream. Where END_STREAM may be set, the frame with it has a name of its own."""

    HEADERS = enum.auto()
    HEADERS_END_STREAM = enum.auto()
    DATA = enum.auto()
    DATA_END_STREAM = enum.auto()
    RST_STREAM = enum.auto()
    WINDOW_UPDATE = enum.auto()


class ServerFrame(enum.IntEnum):
    """What the server sends on a stream."""

    HEADERS = enum.auto()
    DATA = enum.auto()
    #: Trailers, or headers without a message behind them.
    HEADERS_END_STREAM = enum.auto()
    RST_STREAM = enum.auto()


class StreamMistake(msgspec.Struct, frozen=True):
    """A stream error: the server resets the stream with `code`, and the connection continues."""

    code: H2ErrorCode


class ConnectionMistake(msgspec.Struct, frozen=True):
    """A connection error on a stream, which `state` describes to the client."""

    code: H2ErrorCode
    state: str

    def failure(self, frame: ClientFrame, stream_id: int) -> ConnectionFailure:
        return ConnectionFailure(self.code, f"{frame.name} on stream {stream_id}, which is {self.state}")


_NOT_OPEN = ConnectionMistake(H2ErrorCode.PROTOCOL_ERROR, "not open")
_IS_CLOSED = ConnectionMistake(H2ErrorCode.STREAM_CLOSED, "closed")
_REQUEST_HAS_ENDED = StreamMistake(H2ErrorCode.STREAM_CLOSED)
#: Trailers, the second HEADERS of a request, end it.
_TRAILERS_END_NOTHING = StreamMistake(H2ErrorCode.PROTOCOL_ERROR)

#: The state of a stream after a frame of its client, or why the frame is a mistake.
STREAM_STATES: dict[StreamState, dict[ClientFrame, StreamState | StreamMistake | ConnectionMistake]] = {
    StreamState.IDLE: {
        ClientFrame.HEADERS: StreamState.OPEN,
        ClientFrame.HEADERS_END_STREAM: StreamState.HALF_CLOSED_REMOTE,
        ClientFrame.DATA: _NOT_OPEN,
        ClientFrame.DATA_END_STREAM: _NOT_OPEN,
        ClientFrame.RST_STREAM: _NOT_OPEN,
        ClientFrame.WINDOW_UPDATE: _NOT_OPEN,
    },
    StreamState.OPEN: {
        ClientFrame.HEADERS: _TRAILERS_END_NOTHING,
        ClientFrame.HEADERS_END_STREAM: StreamState.HALF_CLOSED_REMOTE,
        ClientFrame.DATA: StreamState.OPEN,
        ClientFrame.DATA_END_STREAM: StreamState.HALF_CLOSED_REMOTE,
        ClientFrame.RST_STREAM: StreamState.CLOSED,
        ClientFrame.WINDOW_UPDATE: StreamState.OPEN,
    },
    StreamState.HALF_CLOSED_REMOTE: {
        ClientFrame.HEADERS: _REQUEST_HAS_ENDED,
        ClientFrame.HEADERS_END_STREAM: _REQUEST_HAS_ENDED,
        ClientFrame.DATA: _REQUEST_HAS_ENDED,
        ClientFrame.DATA_END_STREAM: _REQUEST_HAS_ENDED,
        ClientFrame.RST_STREAM: StreamState.CLOSED,
        ClientFrame.WINDOW_UPDATE: StreamState.HALF_CLOSED_REMOTE,
    },
    StreamState.CLOSED: {
        ClientFrame.HEADERS: _IS_CLOSED,
        ClientFrame.HEADERS_END_STREAM: _IS_CLOSED,
        # Ignored: they may have been on their way when the stream was closed.
        ClientFrame.DATA: StreamState.CLOSED,
        ClientFrame.DATA_END_STREAM: StreamState.CLOSED,
        ClientFrame.RST_STREAM: StreamState.CLOSED,
        ClientFrame.WINDOW_UPDATE: StreamState.CLOSED,
    },
    StreamState.RESET: dict.fromkeys(ClientFrame, StreamState.RESET),
}

#: The state of a stream after a frame of the server, which sends nothing on other streams.
STREAM_STATES_SENDING: dict[StreamState, dict[ServerFrame, StreamState]] = {
    StreamState.OPEN: {
        ServerFrame.HEADERS: StreamState.OPEN,
        ServerFrame.DATA: StreamState.OPEN,
        ServerFrame.HEADERS_END_STREAM: StreamState.RESET,
        ServerFrame.RST_STREAM: StreamState.RESET,
    },
    StreamState.HALF_CLOSED_REMOTE: {
        ServerFrame.HEADERS: StreamState.HALF_CLOSED_REMOTE,
        ServerFrame.DATA: StreamState.HALF_CLOSED_REMOTE,
        ServerFrame.HEADERS_END_STREAM: StreamState.CLOSED,
        ServerFrame.RST_STREAM: StreamState.RESET,
    },
}
