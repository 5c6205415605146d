"""The server side of one HTTP/2 connection as a state machine: bytes in, events and bytes out. Pure.

Takes what RFC 9113 and the limits of `limits.py` allow, and ends a stream or the connection for the
rest. The order of use: `receive`, look at `events`, answer, `pump`, write what `take_output` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.complete_frames import WholeFrames
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode
from protocols.grpc.h2.partial import DataFrame, OpenBlock
from protocols.grpc.h2.states import check_head
from protocols.grpc.h2.streams import Event, Stream

if TYPE_CHECKING:
    from protocols.grpc.h2.keepalive import KeepaliveRules


class H2Connection(WholeFrames):
    """Everything about one connection but its socket; the methods to answer with are in `Answers`."""

    def __init__(self, rules: KeepaliveRules | None = None) -> None:
        super().__init__(rules)
        #: Whether `receive` stopped with whole frames left, because others shall have their turn.
        self.more = False
        #: How many of the server's pings the client has answered, and the highest stream number before the last.
        self.ping_ack_count = 0
        self.ping_ack_number = 0
        self._preface_seen = False
        self._settings_seen = False
        self._block: OpenBlock | None = None
        self._skip_left = 0
        self._now_ns = 0
        #: Since when the handshake or a header block was seen incomplete.
        self._waiting_ns: int | None = None

    # ---- bytes in ----------------------------------------------------------------------------

    def receive(self, data: memoryview, now_ns: int, max_frames: int = limits.FRAMES_PER_TURN) -> int:
        """Take frames from `data`; returns how many bytes were taken.

        The rest comes again, with what follows it. What DATA frames carry is copied.
        """
        self.more = False
        if self.failed:
            return len(data)
        self._now_ns = now_ns
        try:
            return self._receive(data, max_frames)
        except ConnectionFailure as failure:
            self.fail(failure.code, failure.text)
            return len(data)

    def direct_buffer(self) -> memoryview | None:
        """Return where the next bytes of the connection may be received to directly, None for nowhere.

        Asked when all received bytes have been taken.
        """
        frame = self._data
        if frame is None or frame.stream is None or not frame.stream.open:
            return None
        buffer = frame.stream.reader.direct()
        return None if buffer is None else buffer[: frame.content_left]

    def received_directly(self, byte_size: int) -> None:
        """So many bytes were received to what `direct_buffer` returned."""
        frame = self._data
        assert frame is not None
        assert frame.stream is not None
        frame.stream.reader.filled(byte_size)
        frame.content_left -= byte_size
        if not frame.content_left and not frame.padding_left:
            self._end_data(frame)

    def _receive(self, data: memoryview, max_frames: int) -> int:
        position, size = 0, len(data)
        if not self._preface_seen:
            position = self._take_preface(data)
            if not self._preface_seen:
                return 0
        for _ in range(max_frames):
            if self._data is not None or self._skip_left:
                position += self._pass(data[position:])
                if self._data is not None or self._skip_left:
                    return position
            if size - position < 9:
                return position
            high, low, kind, flags, number = frames.HEAD.unpack_from(data, position)
            length = high << 8 | low
            number &= frames.NUMBER_MASK
            if self._settings_seen and self._block is None:  # what is usual, in one step
                end = 0
                if kind == frames.HEADERS and flags == frames.END_HEADERS:
                    end = self._whole_call(data, position + 9, position + 9 + length, number)
                    if self._data is not None:  # whoever answers the call says where the rest belongs
                        return end
                elif kind == frames.WINDOW_UPDATE and length == 4:
                    end = self._whole_update(data, position, number)
                elif kind == frames.DATA and not flags:
                    end = self._whole_message(data, position, number)
                if end:
                    position = end
                    continue
            self._check_order(kind, flags, number, length)
            start = position + 9
            if kind == frames.DATA:
                padded = flags & frames.PADDED
                if padded and size == start and length:
                    return position
                padding = data[start] if padded and length else 0
                self._begin_data(flags, number, length, padding)
                position = start + 1 if padded else start
            elif kind > frames.CONTINUATION or kind == frames.GOAWAY:
                self._flood.idle_frame(self._now_ns)
                self._skip_left = length
                position = start
            elif size - start < length:
                return position
            else:
                position = start + length
                self._control(kind, flags, number, data[start:position])
        self.more = position < size
        return position

    def _take_preface(self, data: memoryview) -> int:
        seen = bytes(data[: len(frames.PREFACE)])
        if not frames.PREFACE.startswith(seen):
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2")
        if len(seen) < len(frames.PREFACE):
            return 0
        self._preface_seen = True
        return len(seen)

    def _check_order(self, kind: int, flags: int, number: int, length: int) -> None:
        """Check what can be told of a frame by its head. Raises `ConnectionFailure`."""
        if self._block is not None:
            if kind != frames.CONTINUATION or number != self._block.number:
                raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "a header block was not continued")
        elif kind == frames.CONTINUATION:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        if not self._settings_seen:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._settings_seen = True
        check_head(kind, flags, number, length)

    # ---- DATA --------------------------------------------------------------------------------

    def _begin_data(self, flags: int, number: int, length: int, padding: int) -> None:
        padded = bool(flags & frames.PADDED)
        if number == 0 or number > self.last_number:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"DATA on stream {number}, which is not open")
        if padded and padding >= length:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "more padding than DATA")
        if not self.window.take(length):
            raise ConnectionFailure(H2ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        content = length - padding - padded
        end_stream = bool(flags & frames.END_STREAM)
        if not end_stream:
            self._flood.data(content)
        stream = self._receiver(number, length, content, whole=end_stream)
        frame = DataFrame(stream, length, content, padding, end_stream)
        if content or padding:
            self._data = frame
        else:
            self._end_data(frame)

    def _receiver(self, number: int, length: int, content: int, *, whole: bool) -> Stream | None:
        """Return the stream that wants a DATA frame; `whole` if the frame ends it."""
        stream = self.streams.get(number)
        if stream is None:
            return None
        if stream.remote_closed:
            self._reset_for_fault(stream, H2ErrorCode.STREAM_CLOSED)
            return None
        # A request in a single frame, the usual one, is smaller than the window and does not need it again.
        if not (whole and not stream.received) and not stream.window.take(length):
            self._reset_for_fault(stream, H2ErrorCode.FLOW_CONTROL_ERROR)
            return None
        stream.held += length
        stream.received += content
        return stream

    def _pass(self, data: memoryview) -> int:
        """Pass on the payload of a frame that may not have come in full; returns how many bytes."""
        frame, taken = self._data, 0
        if frame is not None:
            taken = min(frame.content_left, len(data))
            if taken and frame.stream is not None and frame.stream.open:
                frame.stream.reader.feed(data[:taken])
            frame.content_left -= taken
            padding = min(frame.padding_left, len(data) - taken)
            frame.padding_left -= padding
            if not frame.content_left and not frame.padding_left:
                self._end_data(frame)
            return taken + padding
        taken = min(self._skip_left, len(data))
        self._skip_left -= taken
        return taken

    def _end_data(self, frame: DataFrame) -> None:
        self._data = None
        stream = frame.stream
        if stream is None:
            self._credit_connection(frame.byte_size)
        elif stream.open:
            if frame.end_stream:
                self._end_remote(stream)
                return
            reader = stream.reader
            if reader.messages or reader.fault is not None:
                self.events.append((Event.READABLE, stream))
            self.consumed(stream)

    def _end_remote(self, stream: Stream) -> None:
        """The client has sent all of a request."""
        stream.remote_closed = True
        if stream.ended_early():
            self._reset_for_fault(stream, H2ErrorCode.PROTOCOL_ERROR)
            return
        stream.reader.end()
        self.events.append((Event.READABLE, stream))

    # ---- other frames ------------------------------------------------------------------------

    def _control(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        if kind == frames.HEADERS:
            self._headers(flags, number, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(number, frames.word(payload) & frames.NUMBER_MASK)
        elif kind == frames.RST_STREAM:
            self._rst_stream(number)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, payload)
        elif kind == frames.PING:
            if flags & frames.ACK:
                self.ping_ack_count += 1
                self.ping_ack_number = self.last_number
            else:
                self._flood.ping(self._now_ns, calls=bool(self.streams), sent_byte_size=self.sent_byte_size)
                self.put_control(frames.ping_ack(payload))
        elif kind == frames.SETTINGS:
            if not flags & frames.ACK:
                self._flood.settings(self._now_ns)
                self.take_settings(payload)
        else:
            self._flood.idle_frame(self._now_ns)  # PRIORITY

    def _headers(self, flags: int, number: int, payload: memoryview) -> None:
        start, end = 0, len(payload)
        if flags & frames.PADDED and end:
            start, end = 1, end - payload[0]
        if flags & frames.PRIORITY_FLAG:
            start += 5
        if start > end:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "more padding than HEADERS")
        block, end_stream = bytes(payload[start:end]), bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._header_block(number, block, end_stream)
        else:
            self._block = OpenBlock(number, end_stream, bytearray(block))

    def _continuation(self, flags: int, payload: memoryview) -> None:
        block = self._block
        assert block is not None, "checked with the frame's head"
        block.frame_count += 1
        block.octets += payload
        if block.frame_count > limits.MAX_CONTINUATION_FRAMES or len(block.octets) > limits.MAX_HEADER_BLOCK_BYTE_SIZE:
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & frames.END_HEADERS:
            self._block = None
            self._header_block(block.number, bytes(block.octets), block.end_stream)

    def _header_block(self, number: int, block: bytes, end_stream: bool) -> None:
        head = self._decoder.decode(block)  # also where nobody wants it: it changes the table
        if number <= self.last_number:
            self._late_headers(number, end_stream)
            return
        if number % 2 == 0:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"a request on stream {number}")
        self.last_number = number
        if head.fault or len(self.streams) >= limits.MAX_CONCURRENT_STREAMS:
            self._flood.stream_reset(self._now_ns)
            code = H2ErrorCode.PROTOCOL_ERROR if head.fault else H2ErrorCode.REFUSED_STREAM
            self.put_reset(number, code)
            return
        stream = self.streams[number] = Stream(number, head, self.initial_send_window)
        self.events.append((Event.OPENED, stream))
        if end_stream:
            self._end_remote(stream)

    def _late_headers(self, number: int, end_stream: bool) -> None:
        """Headers on a stream that has had its own: trailers, or a mistake."""
        stream = self.streams.get(number)
        if stream is None:
            if number not in self.recently_reset:
                raise ConnectionFailure(H2ErrorCode.STREAM_CLOSED, f"HEADERS on stream {number}, which is closed")
        elif stream.remote_closed:
            self._reset_for_fault(stream, H2ErrorCode.STREAM_CLOSED)
        elif not end_stream:
            self._reset_for_fault(stream, H2ErrorCode.PROTOCOL_ERROR)
        else:
            self._end_remote(stream)

    def _rst_stream(self, number: int) -> None:
        if number > self.last_number:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {number}, which is not open")
        stream = self.streams.get(number)
        if stream is not None:
            self._flood.stream_reset(self._now_ns)
            self.forget(stream)
            self.events.append((Event.CLOSED, stream))

    def _reset_for_fault(self, stream: Stream, code: H2ErrorCode) -> None:
        self._flood.stream_reset(self._now_ns)
        self.reset(stream, code)
        self.events.append((Event.CLOSED, stream))

    def _window_update(self, number: int, increment: int) -> None:
        if number > self.last_number:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {number}, which is not open")
        if number == 0:
            self.open_connection_window(increment)
        elif (stream := self.streams.get(number)) is not None:
            if not increment:
                self._reset_for_fault(stream, H2ErrorCode.PROTOCOL_ERROR)
            elif stream.send_window + increment > frames.MAX_WINDOW:
                self._reset_for_fault(stream, H2ErrorCode.FLOW_CONTROL_ERROR)
            else:
                stream.send_window += increment

    # ---- patience ----------------------------------------------------------------------------

    def check_progress(self, now_ns: int) -> None:
        """Look, now and then, for what has waited too long: handshake, header blocks, and output."""
        if self.failed:
            return
        self._now_ns = now_ns
        if self._settings_seen and not self._block:
            self._waiting_ns = None
        elif self._waiting_ns is None:
            self._waiting_ns = now_ns
        elif now_ns - self._waiting_ns >= limits.HANDSHAKE_TIMEOUT_S * 10**9:
            self.fail(H2ErrorCode.PROTOCOL_ERROR, "the client is too slow")
            return
        self.drop_stalled(now_ns)
