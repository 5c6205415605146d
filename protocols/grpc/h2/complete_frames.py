"""What requests usually are, taken in one step each: the short way of a connection's receiving half. Pure.

Each step takes what it recognises as usual and right, and leaves all else, and every mistake, to be looked at
frame by frame: it then returns 0 and has changed nothing.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from protocols.grpc.framing import HEAD_BYTE_SIZE, LARGE_BYTE_SIZE, PREFIX
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.headers import HeaderDecoder
from protocols.grpc.h2.partial import DataFrame
from protocols.grpc.h2.sending import SendingHalf
from protocols.grpc.h2.streams import Event, Stream

if TYPE_CHECKING:
    from protocols.grpc.h2.keepalive import KeepaliveRules

#: The head of a DATA frame and the prefix of a message behind it.
_MESSAGE = struct.Struct(">HBBBLBL")

_UPDATE = struct.Struct(">HBBBLL")


class WholeFrames(SendingHalf):
    """Takes frames that have come whole, and no header block is open."""

    def __init__(self, rules: KeepaliveRules | None) -> None:
        super().__init__()
        self._decoder = HeaderDecoder()
        self._flood = limits.FloodCounters(rules)
        #: A DATA frame of which more is to come.
        self._data: DataFrame | None = None

    def _whole_call(self, data: memoryview, start: int, data_start: int, number: int) -> int:
        """Take a call that is HEADERS as they came before and a single DATA frame; returns what was taken of it.

        Between them may stand the WINDOW_UPDATE of the stream that clients of gRPC core send. The header block
        lies between `start` and `data_start`. Of a large message only the begin is taken, and the frame left open.
        """
        size, window, headers_end = len(data), self.initial_send_window, data_start
        if size < data_start + _UPDATE.size + _MESSAGE.size:
            return 0  # also where a tiny call ends just here
        if data[data_start + 3] == frames.WINDOW_UPDATE:
            high, low, _, _, data_number, increment = _UPDATE.unpack_from(data, data_start)
            data_start += _UPDATE.size
            window += increment
            if high or low != 4 or data_number != number or not increment or window > frames.MAX_WINDOW:
                return 0
        high, low, kind, flags, data_number, flag, byte_size = _MESSAGE.unpack_from(data, data_start)
        length = high << 8 | low
        content: int = data_start + _MESSAGE.size
        end: int = content + byte_size
        if (
            kind != frames.DATA
            or flags != frames.END_STREAM
            or data_number != number
            or flag
            or length != byte_size + PREFIX.size
            or (end > size and (byte_size < LARGE_BYTE_SIZE or size < content + HEAD_BYTE_SIZE))
            or length > limits.MAX_FRAME_BYTE_SIZE
            or number <= self.last_number
            or not number & 1
            or len(self.streams) >= limits.MAX_CONCURRENT_STREAMS
        ):
            return 0
        head = self._decoder.known.get(bytes(data[start:headers_end]))
        if head is None or head.fault or head.content_length is not None or not self.window.take(length):
            return 0
        self.last_number = number
        stream = self.streams[number] = Stream(number, head, window)
        stream.held = stream.received = length
        if end > size:
            begin_end = content + HEAD_BYTE_SIZE
            stream.reader.begin_large(bytes(data[content:begin_end]), byte_size)
            self._data = DataFrame(stream, length, byte_size - HEAD_BYTE_SIZE, 0, end_stream=True)
            self.events.append((Event.OPENED, stream))
            return begin_end
        stream.remote_closed = True
        stream.whole = bytes(data[content:end])
        self.events.append((Event.CALLED, stream))
        return end

    def _whole_message(self, data: memoryview, start: int, number: int) -> int:
        """Take a DATA frame, whose head is at `start`, that is one message of a stream; returns where it ends."""
        if len(data) < start + _MESSAGE.size:
            return 0
        high, low, _, _, _, flag, byte_size = _MESSAGE.unpack_from(data, start)
        length = high << 8 | low
        content: int = start + _MESSAGE.size
        end: int = content + byte_size
        stream = self.streams.get(number)
        if (
            stream is None
            or stream.remote_closed
            or flag
            or length != byte_size + PREFIX.size
            or length >= LARGE_BYTE_SIZE
            or end > len(data)
        ):
            return 0
        reader, window = stream.reader, stream.window
        if not reader.between_messages or not window.has(length) or not self.window.take(length):
            return 0
        window.take(length)
        self._flood.data(length)
        stream.held += length
        stream.received += length
        reader.messages.append(bytes(data[content:end]))
        self.events.append((Event.READABLE, stream))
        return end

    def _whole_update(self, data: memoryview, start: int, number: int) -> int:
        """Take a WINDOW_UPDATE, whose head is at `start`, of the connection or an open stream; returns where it ends.

        Clients of gRPC core send as many as messages.
        """
        if len(data) < start + _UPDATE.size:
            return 0
        increment: int = _UPDATE.unpack_from(data, start)[-1]
        stream = self.streams.get(number)
        if number == 0:
            if not 0 < increment <= frames.MAX_WINDOW - self.send_window:
                return 0
            self.send_window += increment
        elif stream is None or not 0 < increment <= frames.MAX_WINDOW - stream.send_window:
            return 0
        else:
            stream.send_window += increment
        return start + _UPDATE.size
