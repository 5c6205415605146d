"""The short path of the receiving half: usual frames that have arrived completely, each taken in one step. Pure.

Each step takes what it recognises as usual and correct. It leaves everything else, and every mistake, to
`receiving.py`, which looks at one frame after the other: it then returns 0 and has changed nothing. Both ways have
the same result, which the tests compare.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from protocols.body_sizes import RECEIVE_BUFFER_BYTE_SIZE
from protocols.grpc.framing import MESSAGE_START_BYTE_SIZE, PREFIX
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.states import StreamState
from protocols.grpc.h2.stream_frames import UnfinishedData
from protocols.grpc.h2.streams import Stream, StreamEvent

if TYPE_CHECKING:
    from protocols.grpc.h2.flow_control import PeerLimits, ReceiveWindow
    from protocols.grpc.h2.headers import RequestHeadDecoder
    from protocols.grpc.h2.limits import FloodCounters
    from protocols.grpc.h2.stream_frames import StreamFrames
    from protocols.grpc.h2.streams import Streams

#: The frame header of DATA and the prefix of the message in it.
_MESSAGE_START = struct.Struct(">HBBBLBL")

_WINDOW_UPDATE = struct.Struct(">HBBBLL")

# Names of this module are found faster than members of an enum (states.py).
_OPEN, _HALF_CLOSED_REMOTE = StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE
_COMPLETE, _READABLE = StreamEvent.COMPLETE, StreamEvent.READABLE


class CompleteFrames:
    """Used while the connection is open and no frame is unfinished."""

    def __init__(
        self,
        streams: Streams,
        peer: PeerLimits,
        receive_window: ReceiveWindow,
        decoder: RequestHeadDecoder,
        floods: FloodCounters,
        stream_frames: StreamFrames,
    ) -> None:
        """`receive_window` is that of the connection."""
        self._streams = streams
        self._peer = peer
        self._receive_window = receive_window
        self._decoder = decoder
        self._floods = floods
        self._stream_frames = stream_frames

    def take_call(self, data: memoryview, start: int, block_end: int, stream_id: int) -> int:
        """Take a call that is HEADERS with a known header block and a single DATA frame; returns where it ends.

        Between them may stand the WINDOW_UPDATE of the stream that clients of gRPC core send. The header block lies
        between `start` and `block_end`. Of a large message only the start is taken: then the DATA frame becomes
        `StreamFrames.unfinished`, and the transport can ask the call where the rest belongs.
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
        streams.events.append((StreamEvent.OPENED, stream))
        end = content + MESSAGE_START_BYTE_SIZE
        stream.message_reader.begin_large(bytes(data[content:end]), byte_size)
        content_left = byte_size - MESSAGE_START_BYTE_SIZE
        self._stream_frames.unfinished = UnfinishedData(stream, length, content_left, 0, ends_stream=True)
        return end

    def take_message(self, data: memoryview, start: int, stream_id: int) -> int:
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

    def take_window_update(self, data: memoryview, start: int, stream_id: int) -> int:
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
