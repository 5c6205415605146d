"""What the client's frames do to its streams: requests, their DATA, and the client's windows. Pure.

`StreamFrames` takes one frame after the other. The payload of DATA may arrive in any number of pieces; each goes to its
stream's message reader at once, and the bytes of a large message may be received to where they belong without a copy
(`direct_buffer`).

Its last methods (`take_complete_call` and so on) are the short path: usual frames that have arrived completely, each
taken in one step. They take what they recognise as usual and correct. Everything else, and every mistake, is left to
`ReceivingHalf` and the other methods: a step then returns 0 and has changed nothing. Both ways have the same result,
which the tests compare.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec
from grpclib.const import Status

from protocols.grpc.framing import MESSAGE_START_BYTE_SIZE, PREFIX
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import (
    FRAME_HEADER,
    FRAME_HEADER_BYTE_SIZE,
    STREAM_ID_MASK,
    ConnectionFailure,
    H2ErrorCode,
)
from protocols.grpc.h2.headers import RETRY_LATER, status_trailers
from protocols.grpc.h2.states import STREAM_STATES, ClientFrame, ConnectionMistake, StreamMistake, StreamState
from protocols.grpc.h2.streams import Stream, StreamEvent
from protocols.request_limits import RECEIVE_BUFFER_BYTE_SIZE

if TYPE_CHECKING:
    from protocols.grpc.h2.headers import RequestHead, RequestHeadDecoder
    from protocols.grpc.h2.limits import FloodCounters
    from protocols.grpc.h2.sending import SendingHalf
    from protocols.grpc.h2.streams import PeerLimits, ReceiveWindow, Streams

# Names of this module are found faster than members of an enum (states.py).
_OPEN, _CLOSED, _HALF_CLOSED_REMOTE = StreamState.OPEN, StreamState.CLOSED, StreamState.HALF_CLOSED_REMOTE
_DATA, _DATA_END_STREAM = ClientFrame.DATA, ClientFrame.DATA_END_STREAM
_OPENED, _READABLE, _COMPLETE = StreamEvent.OPENED, StreamEvent.READABLE, StreamEvent.COMPLETE

#: The least content of a frame that `take_parts_of_message` takes, so that one read has few of these frames.
LEAST_PART_BYTE_SIZE = 4096

#: The frame header of DATA and the prefix of the message in it; a WINDOW_UPDATE.
_MESSAGE_START, _WINDOW_UPDATE = struct.Struct(">HBBBLBL"), struct.Struct(">HBBBLL")


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
        decoder: RequestHeadDecoder,
    ) -> None:
        """`receive_window` is the connection's; `decoder` knows the header blocks that have come before."""
        #: The DATA frame that is being received. No other frame may be taken before it is None again.
        self.unfinished: UnfinishedData | None = None
        self._streams = streams
        self._peer = peer
        self._receive_window = receive_window
        self._sending = sending
        self._floods = floods
        self._decoder = decoder

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
        """Open the client's window of a stream, or with 0 as `stream_id` the connection's."""
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

    # ---- usual frames that have arrived completely, each taken in one step --------------------

    def take_complete_call(self, data: memoryview, start: int, block_end: int, stream_id: int) -> int:
        """Take a call that is HEADERS with a known header block and a single DATA frame; returns where it ends.

        Between them may stand the WINDOW_UPDATE of the stream that clients of gRPC core send. The header block lies
        between `start` and `block_end`. Of a large message only the start is taken: then the DATA frame becomes
        `unfinished`, and the transport can ask the call where the rest belongs.
        """
        streams, size = self._streams, len(data)
        send_window, data_start = self._peer.initial_send_window, block_end
        if size < data_start + _WINDOW_UPDATE.size + _MESSAGE_START.size:
            return 0  # also where a tiny call ends just here
        if data[data_start + 3] == frames.WINDOW_UPDATE:
            high, low, _, _, data_stream_id, increment = _WINDOW_UPDATE.unpack_from(data, data_start)
            data_start += _WINDOW_UPDATE.size
            send_window += increment
            if high or low != 4 or data_stream_id != stream_id or not increment or send_window > frames.MAX_WINDOW:
                return 0
        high, low, frame_type, flags, data_stream_id, compressed, byte_size = _MESSAGE_START.unpack_from(
            data, data_start
        )
        length = high << 8 | low
        content: int = data_start + _MESSAGE_START.size
        end: int = content + byte_size
        if (
            frame_type != frames.DATA
            or flags != frames.END_STREAM
            or data_stream_id != stream_id
            or compressed
            or length != byte_size + PREFIX.size
            or (end > size and (byte_size < RECEIVE_BUFFER_BYTE_SIZE or size < content + MESSAGE_START_BYTE_SIZE))
            or length > limits.MAX_FRAME_BYTE_SIZE
            or stream_id <= streams.last_id
            or not stream_id & 1
            or len(streams.by_id) >= limits.MAX_CONCURRENT_STREAMS
        ):
            return 0
        request_head = self._decoder.known.get(bytes(data[start:block_end]))
        if (
            request_head is None
            or request_head.fault
            or (request_head.content_length is not None and request_head.content_length != length)
            or not self._receive_window.take(length)
        ):
            return 0
        streams.last_id = stream_id
        if end <= size:
            message = bytes(data[content:end])
            stream = Stream(stream_id, request_head, send_window, _HALF_CLOSED_REMOTE, message, length, length, True)
            streams.by_id[stream_id] = stream
            streams.events.append((_COMPLETE, stream))
            return end
        stream = Stream(stream_id, request_head, send_window, _OPEN, None, length, length, memory=streams.memory)
        streams.by_id[stream_id] = stream
        streams.events.append((_OPENED, stream))
        end = content + MESSAGE_START_BYTE_SIZE
        stream.message_reader.begin_large(bytes(data[content:end]), byte_size)
        content_left = byte_size - MESSAGE_START_BYTE_SIZE
        self.unfinished = UnfinishedData(stream, length, content_left, 0, ends_stream=True)
        return end

    def take_complete_message(self, data: memoryview, start: int, stream_id: int) -> int:
        """Take a DATA frame, which begins at `start`, that is one message of a stream; returns where it ends."""
        if len(data) < start + _MESSAGE_START.size:
            return 0
        high, low, _, _, _, compressed, byte_size = _MESSAGE_START.unpack_from(data, start)
        length = high << 8 | low
        content: int = start + _MESSAGE_START.size
        end: int = content + byte_size
        stream = self._streams.by_id.get(stream_id)
        if (
            stream is None
            or stream.state is not _OPEN
            or compressed
            or length != byte_size + PREFIX.size
            or length >= RECEIVE_BUFFER_BYTE_SIZE
            or end > len(data)
        ):
            return 0
        reader, window = stream.message_reader, stream.receive_window
        if (
            not reader.between_messages
            or not reader.has_room(byte_size)
            or not window.has_room(length)
            or not self._receive_window.take(length)
        ):
            return 0
        window.take(length)
        self._floods.data(length)
        stream.held_byte_size += length
        stream.received_byte_size += length
        reader.add(bytes(data[content:end]))
        self._streams.events.append((_READABLE, stream))
        return end

    def take_parts_of_message(self, data: memoryview, start: int, stream_id: int) -> int:
        """Take DATA frames with parts of a large message, the first of which begins at `start`; returns where they end.

        Clients that keep to frames of 16 KiB, which HTTP/2 begins with, send 64 of them for 1 MiB. Other methods
        take the frame with the last byte of the message, small frames, and frames beyond a window.
        """
        stream = self._streams.by_id.get(stream_id)
        if stream is None or stream.state is not _OPEN or (buffer := stream.message_reader.rest_of_large()) is None:
            return 0
        reader, window = stream.message_reader, stream.receive_window
        most, size = len(buffer), len(data)
        position, taken, length = start, 0, 0
        while size - position >= FRAME_HEADER_BYTE_SIZE:
            high, low, frame_type, flags, id_ = FRAME_HEADER.unpack_from(data, position)
            length = high << 8 | low
            if (
                frame_type != frames.DATA
                or flags
                or id_ & STREAM_ID_MASK != stream_id
                or length < LEAST_PART_BYTE_SIZE
                or taken + length >= most
                or not window.has_room(length)
                or not self._receive_window.take(length)
            ):
                break
            window.take(length)
            content = position + FRAME_HEADER_BYTE_SIZE
            position = content + length
            if position > size:
                break
            buffer[taken : taken + length] = data[content:position]
            taken += length
        if position == start:
            return 0
        self._floods.data(position - start)
        if taken:
            reader.received_directly(taken)
            stream.held_byte_size += taken
            stream.received_byte_size += taken
            self._sending.consumed(stream)
        if position <= size:
            return position
        # The start of one more.
        left = position - size
        arrived = length - left
        buffer[taken : taken + arrived] = data[size - arrived :]
        reader.received_directly(arrived)
        stream.held_byte_size += length
        stream.received_byte_size += length
        self.unfinished = UnfinishedData(stream, length, left, 0, ends_stream=False)
        return size

    def take_complete_window_update(self, data: memoryview, start: int, stream_id: int) -> int:
        """Take a WINDOW_UPDATE, which begins at `start`, of the connection or an open stream; returns where it ends.

        Clients of gRPC core send as many as messages.
        """
        if len(data) < start + _WINDOW_UPDATE.size:
            return 0
        increment: int = _WINDOW_UPDATE.unpack_from(data, start)[-1]
        if stream_id == 0:
            peer = self._peer
            if not 0 < increment <= frames.MAX_WINDOW - peer.send_window:
                return 0
            peer.send_window += increment
            return start + _WINDOW_UPDATE.size
        stream = self._streams.by_id.get(stream_id)
        if stream is None or not 0 < increment <= frames.MAX_WINDOW - stream.send_window:
            return 0
        stream.send_window += increment
        return start + _WINDOW_UPDATE.size
