"""What the client's frames do to its streams: requests, their DATA, and the client's windows. Pure.

The payload of DATA may arrive in any number of pieces; each goes to its stream's message reader at once, and the
bytes of a large message may be received to where they belong without a copy (`direct_buffer`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from grpclib.const import Status

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode
from protocols.grpc.h2.headers import RETRY_LATER, status_trailers
from protocols.grpc.h2.states import STREAM_STATES, ClientFrame, ConnectionMistake, StreamMistake, StreamState
from protocols.grpc.h2.streams import Stream, StreamEvent

if TYPE_CHECKING:
    from protocols.grpc.h2.flow_control import PeerLimits, ReceiveWindow
    from protocols.grpc.h2.headers import RequestHead
    from protocols.grpc.h2.limits import FloodCounters
    from protocols.grpc.h2.sending import SendingHalf
    from protocols.grpc.h2.streams import Streams

# Names of this module are found faster than members of an enum (states.py).
_CLOSED, _HALF_CLOSED_REMOTE = StreamState.CLOSED, StreamState.HALF_CLOSED_REMOTE
_DATA, _DATA_END_STREAM = ClientFrame.DATA, ClientFrame.DATA_END_STREAM
_OPENED, _READABLE = StreamEvent.OPENED, StreamEvent.READABLE


class UnfinishedData(msgspec.Struct):
    """A DATA frame whose payload has not arrived completely."""

    #: None if the payload is dropped.
    stream: Stream | None
    #: Of the whole payload, which is what flow control counts.
    byte_size: int
    content_left: int
    padding_left: int
    ends_stream: bool


class StreamFrames:
    """Takes one frame after the other, checked against `states.STREAM_STATES`, and notes events in `streams`.

    Every `take` and `begin` may raise `ConnectionFailure`. A stream error resets the stream.
    """

    def __init__(
        self,
        streams: Streams,
        peer: PeerLimits,
        receive_window: ReceiveWindow,
        sending: SendingHalf,
        floods: FloodCounters,
    ) -> None:
        """`receive_window` is that of the connection."""
        #: The DATA frame that is being received. No other frame may be taken before it is None again.
        self.unfinished: UnfinishedData | None = None
        self._streams = streams
        self._peer = peer
        self._receive_window = receive_window
        self._sending = sending
        self._floods = floods

    def _accepted(self, stream_id: int, frame: ClientFrame) -> Stream | None:
        """Return the stream that `frame` is for, None if the frame is ignored, or was a stream error."""
        stream = self._streams.by_id.get(stream_id)
        state = self._streams.state_of(stream_id) if stream is None else stream.state
        outcome = STREAM_STATES[state][frame]
        if isinstance(outcome, StreamState):
            return stream
        if isinstance(outcome, ConnectionMistake):
            raise outcome.failure(frame, stream_id)
        assert stream is not None, "a closed stream has no stream errors"
        self._reset_for_mistake(stream, outcome)
        return None

    def _reset_for_mistake(self, stream: Stream, mistake: StreamMistake) -> None:
        self._floods.stream_reset()
        self._sending.reset(stream, mistake.code)
        self._streams.events.append((StreamEvent.CLOSED, stream))

    # ---- HEADERS, RST_STREAM, WINDOW_UPDATE --------------------------------------------------

    def take_headers(self, stream_id: int, request_head: RequestHead, *, end_stream: bool) -> None:
        """Open a stream, or end its request with trailers."""
        streams = self._streams
        if stream_id <= streams.last_id:
            stream = self._accepted(stream_id, ClientFrame.HEADERS_END_STREAM if end_stream else ClientFrame.HEADERS)
            if stream is not None:
                self._end_request(stream)
            return
        if stream_id % 2 == 0:  # these are the server's (RFC 9113, 5.1.1)
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"a request on stream {stream_id}")
        streams.last_id = stream_id
        if request_head.fault or len(streams.by_id) >= limits.MAX_CONCURRENT_STREAMS:
            self._floods.stream_reset()
            code = H2ErrorCode.PROTOCOL_ERROR if request_head.fault else H2ErrorCode.REFUSED_STREAM
            self._sending.put_reset(stream_id, code)
            return
        stream = Stream(stream_id, request_head, self._peer.initial_send_window, memory=streams.memory)
        streams.by_id[stream_id] = stream
        if not stream.count(few=len(streams.by_id) <= limits.ALWAYS_OPENED_STREAMS):
            assert stream.memory is not None, "without a budget there is room"
            trailers = status_trailers(Status.RESOURCE_EXHAUSTED.value, stream.memory.full().text, RETRY_LATER)
            if end_stream:
                stream.state = _HALF_CLOSED_REMOTE
            self._sending.send_trailers(stream, trailers)
            return
        streams.events.append((_OPENED, stream))
        if end_stream:
            self._end_request(stream)

    def take_rst_stream(self, stream_id: int) -> None:
        stream = self._accepted(stream_id, ClientFrame.RST_STREAM)
        if stream is not None:
            self._floods.stream_reset()
            self._sending.close_stream(stream)
            self._streams.events.append((StreamEvent.CLOSED, stream))

    def take_window_update(self, stream_id: int, increment: int) -> None:
        """Open the client's window of a stream, or with 0 as `stream_id` that of the connection."""
        if stream_id == 0:
            self._peer.open_send_window(increment)
            return
        stream = self._accepted(stream_id, ClientFrame.WINDOW_UPDATE)
        if stream is None:
            return
        if not increment:
            self._reset_for_mistake(stream, StreamMistake(H2ErrorCode.PROTOCOL_ERROR))
        elif stream.send_window + increment > frames.MAX_WINDOW:
            self._reset_for_mistake(stream, StreamMistake(H2ErrorCode.FLOW_CONTROL_ERROR))
        else:
            stream.send_window += increment

    # ---- DATA --------------------------------------------------------------------------------

    def begin_data(self, stream_id: int, flags: int, byte_size: int, padding: int) -> None:
        """Begin a DATA frame with a payload of `byte_size` bytes, of which `padding` are padding.

        With the flag PADDED the payload has one byte more, the length of the padding, which was taken already.
        """
        end_stream = bool(flags & frames.END_STREAM)
        frame = _DATA_END_STREAM if end_stream else _DATA
        if stream_id > self._streams.last_id:
            self._accepted(stream_id, frame)  # raises
        content = byte_size - padding
        if flags & frames.PADDED:
            content -= 1
            if content < 0:
                raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "more padding than DATA")
        if not self._receive_window.take(byte_size):
            raise ConnectionFailure(H2ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        if not end_stream:
            self._floods.data(content)
        stream = self._accepted(stream_id, frame)
        if stream is not None:
            # A request in a single frame, as usual, is smaller than the window, which is then not needed again.
            is_only_frame = end_stream and not stream.received_byte_size
            if is_only_frame or stream.receive_window.take(byte_size):
                stream.held_byte_size += byte_size
                stream.received_byte_size += content
            else:
                self._reset_for_mistake(stream, StreamMistake(H2ErrorCode.FLOW_CONTROL_ERROR))
                stream = None
        unfinished = UnfinishedData(stream, byte_size, content, padding, end_stream)
        if content or padding:
            self.unfinished = unfinished
        else:
            self._end_data(unfinished)

    def take_data(self, data: memoryview) -> int:
        """Take the next bytes of the unfinished DATA frame from the start of `data`; returns how many."""
        unfinished = self.unfinished
        assert unfinished is not None
        stream = unfinished.stream
        taken = min(unfinished.content_left, len(data))
        if taken and stream is not None and stream.state is not _CLOSED:
            stream.message_reader.feed(data[:taken])
        unfinished.content_left -= taken
        padding = min(unfinished.padding_left, len(data) - taken)
        unfinished.padding_left -= padding
        if not unfinished.content_left and not unfinished.padding_left:
            self._end_data(unfinished)
        return taken + padding

    def direct_buffer(self) -> memoryview | None:
        """Return where the next bytes of the connection may be received to directly, None for nowhere.

        Asked when all received bytes have been taken.
        """
        unfinished = self.unfinished
        if unfinished is None or unfinished.stream is None or unfinished.stream.state is _CLOSED:
            return None
        buffer = unfinished.stream.message_reader.direct_buffer()
        return None if buffer is None else buffer[: unfinished.content_left]

    def received_directly(self, byte_size: int) -> None:
        """Count `byte_size` bytes that were received to what `direct_buffer` returned.

        The transport calls it: the connection ends here for what the other methods raise.
        """
        unfinished = self.unfinished
        assert unfinished is not None
        assert unfinished.stream is not None
        unfinished.stream.message_reader.received_directly(byte_size)
        unfinished.content_left -= byte_size
        if not unfinished.content_left and not unfinished.padding_left:
            try:
                self._end_data(unfinished)
            except ConnectionFailure as failure:
                self._sending.fail(failure.code, failure.text)

    def _end_data(self, ended: UnfinishedData) -> None:
        self.unfinished = None
        stream = ended.stream
        if stream is None:
            self._sending.give_back(ended.byte_size)
        elif stream.state is not _CLOSED:
            if ended.ends_stream:
                self._end_request(stream)
                return
            reader = stream.message_reader
            if reader.messages or reader.fault is not None:
                self._streams.events.append((_READABLE, stream))
            self._sending.consumed(stream)

    def _end_request(self, stream: Stream) -> None:
        """The client has sent all of a request."""
        stream.state, stream.request_ended = _HALF_CLOSED_REMOTE, True
        if stream.has_other_length_than_announced():
            self._reset_for_mistake(stream, StreamMistake(H2ErrorCode.PROTOCOL_ERROR))
            return
        stream.message_reader.end()
        self._streams.events.append((_READABLE, stream))
