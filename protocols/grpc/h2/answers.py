"""What one HTTP/2 connection sends: answers of streams within the client's windows, and control frames. Pure.

A small answer leaves in one piece; what does not fit into windows waits in the stream's output, and
`pump` sends it on, a frame from each stream in turn.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

from protocols.grpc.framing import PREFIX
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.flow import Output, ReceiveWindow
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode, Setting
from protocols.grpc.h2.headers import OK_TRAILERS_BLOCK, RESPONSE_BLOCK
from protocols.grpc.h2.streams import Event, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shm.tensor import Buffer

#: Answers up to here are copied into one piece; larger ones are written as they lie.
SMALL_ANSWER_BYTE_SIZE = 64 * 2**10

#: How much may wait to be written before even small answers wait in their streams.
_OUTBOX_BYTE_SIZE = 2**20

#: How many streams that were reset are remembered: their client may not have known when it sent more.
_REMEMBERED_RESETS = 128

#: The begin of an answer: HEADERS, the head of DATA, the prefix of the message.
_ANSWER = struct.Struct(f">HBBBL{len(RESPONSE_BLOCK)}sHBBBLBL")
#: The head of DATA and the prefix of its message.
_MESSAGE = struct.Struct(">HBBBLBL")
_TRAILERS = struct.Struct(f">HBBBL{len(OK_TRAILERS_BLOCK)}s")
_END = frames.END_HEADERS | frames.END_STREAM

_GREETING = frames.settings(
    [
        (Setting.MAX_CONCURRENT_STREAMS, limits.MAX_CONCURRENT_STREAMS),
        (Setting.INITIAL_WINDOW_SIZE, limits.STREAM_WINDOW_BYTE_SIZE),
        (Setting.MAX_FRAME_SIZE, limits.MAX_FRAME_BYTE_SIZE),
        (Setting.MAX_HEADER_LIST_SIZE, limits.MAX_HEADER_LIST_BYTE_SIZE),
    ]
) + frames.window_update(0, limits.CONNECTION_WINDOW_BYTE_SIZE - frames.DEFAULT_WINDOW_BYTE_SIZE)


class SendingHalf:
    """The sending half of a connection, and the streams that both halves know."""

    def __init__(self) -> None:
        #: What happened, in order; whoever handles the events clears the list.
        self.events: list[tuple[Event, Stream]] = []
        self.streams: dict[int, Stream] = {}
        #: The highest number of a request.
        self.last_number = 0
        #: Whether the connection has ended, and its GOAWAY is the last that was put out.
        self.failed = False
        self.recently_reset: deque[int] = deque(maxlen=_REMEMBERED_RESETS)
        #: What the client may send.
        self.window = ReceiveWindow(limits.CONNECTION_WINDOW_BYTE_SIZE)
        #: What the client takes.
        self.initial_send_window = frames.DEFAULT_WINDOW_BYTE_SIZE
        self.max_frame_byte_size = frames.DEFAULT_MAX_FRAME_BYTE_SIZE
        self.outbox_byte_size = len(_GREETING)
        self._taken_byte_size = 0
        self._outbox: list[Buffer] = [_GREETING]
        #: What is to be called, in any order, when all output that was taken so far has left.
        self.releases: list[Callable[[], None]] = []
        #: What the client takes on all streams together.
        self.send_window = frames.DEFAULT_WINDOW_BYTE_SIZE
        #: Streams whose output waits.
        self.waiting: dict[int, Stream] = {}

    # ---- answers -----------------------------------------------------------------------------

    def respond(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None = None) -> None:
        """Answer with one message, whose bytes are `parts`, and the status OK; the stream has ended then.

        `release` is called when the parts are not needed any more, possibly before this returns, or is put into
        `releases`.
        """
        byte_size = sum(map(len, parts))
        size = byte_size + PREFIX.size
        if (
            size > stream.send_window
            or size > self.send_window
            or size > self.max_frame_byte_size
            or self.outbox_byte_size >= _OUTBOX_BYTE_SIZE
        ):
            self.send_headers(stream, RESPONSE_BLOCK)
            self.send_data(stream, [PREFIX.pack(0, byte_size), *parts], release)
            self.send_trailers(stream, OK_TRAILERS_BLOCK)
            return
        number = stream.number
        self.send_window -= size
        begin = _ANSWER.pack(
            0, len(RESPONSE_BLOCK), frames.HEADERS, frames.END_HEADERS, number, RESPONSE_BLOCK,
            size >> 8, size & 0xFF, frames.DATA, 0, number, 0, byte_size,
        )  # fmt: skip
        end = _TRAILERS.pack(0, len(OK_TRAILERS_BLOCK), frames.HEADERS, _END, number, OK_TRAILERS_BLOCK)
        if byte_size <= SMALL_ANSWER_BYTE_SIZE:
            self._outbox.append(b"".join((begin, *parts, end)))
            if release is not None:
                release()
        else:
            self._outbox += (begin, *parts, end)
            if release is not None:
                self.releases.append(release)
        self.outbox_byte_size += len(begin) + byte_size + len(end)
        self._finish(stream)

    def send_headers(self, stream: Stream, block: bytes) -> None:
        stream.headers_sent = True
        self.put(frames.headers(stream.number, block, max_byte_size=self.max_frame_byte_size, end_stream=False))

    def send_data(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None = None) -> None:
        """Send `parts` as windows allow; `Event.SENT` comes when they have left.

        Asked again only when what was given before has left.
        """
        if stream.output is None:
            stream.output = Output()
        stream.output.add(parts, release)
        self.waiting[stream.number] = stream

    def send_message(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None) -> bool:
        """Send a message, whose bytes are `parts`; returns whether it has left, as small ones usually do.

        Otherwise it waits for windows, as by `send_data`, and no other may be sent before it has left.
        """
        byte_size = sum(map(len, parts))
        size = byte_size + PREFIX.size
        if (
            size > SMALL_ANSWER_BYTE_SIZE
            or size > stream.send_window
            or size > self.send_window
            or size > self.max_frame_byte_size
            or self.outbox_byte_size >= _OUTBOX_BYTE_SIZE
        ):
            self.send_data(stream, [PREFIX.pack(0, byte_size), *parts], release)
            return False
        stream.send_window -= size
        self.send_window -= size
        begin = _MESSAGE.pack(size >> 8, size & 0xFF, frames.DATA, 0, stream.number, 0, byte_size)
        self._outbox.append(b"".join((begin, *parts)))
        self.outbox_byte_size += len(begin) + byte_size
        if release is not None:
            release()
        return True

    def drop_data(self, stream: Stream) -> None:
        """Forget data that has not left, because the trailers will say that the call has failed."""
        if self.waiting.pop(stream.number, None) is not None:
            self._close_output(stream)

    def _close_output(self, stream: Stream) -> None:
        """Drop what is left of a stream's output. What was taken of it may still be on its way."""
        assert stream.output is not None
        if (release := stream.output.take_release()) is not None:
            self.releases.append(release)
        stream.output.close()

    def send_trailers(self, stream: Stream, block: bytes) -> None:
        """End the answer, behind all data; without headers before, the trailers are headers as well."""
        if stream.number in self.waiting:
            assert stream.output is not None
            stream.output.trailers = block
            return
        self.put(frames.headers(stream.number, block, max_byte_size=self.max_frame_byte_size, end_stream=True))
        self._finish(stream)

    def _finish(self, stream: Stream) -> None:
        """The server has sent its last frame; a client that is still sending need not."""
        self.forget(stream)
        stream.call = None
        if not stream.remote_closed:
            self.put_reset(stream.number, H2ErrorCode.NO_ERROR)

    def reset(self, stream: Stream, code: H2ErrorCode) -> None:
        """End a stream without an answer, or in the middle of it."""
        self.forget(stream)
        self.put_reset(stream.number, code)

    def forget(self, stream: Stream) -> None:
        """The stream has ended in both directions."""
        stream.open = False
        del self.streams[stream.number]
        if stream.held:
            increment, stream.held = self.window.give(stream.held), 0
            if increment and not self.failed:
                self.put(frames.window_update(0, increment))
        if stream.output is not None:
            self.drop_data(stream)

    def put_reset(self, number: int, code: H2ErrorCode) -> None:
        self.recently_reset.append(number)
        self.put(frames.rst_stream(number, code))

    # ---- windows -----------------------------------------------------------------------------

    def consumed(self, stream: Stream) -> None:
        """Let the client send more once all complete messages were taken."""
        if not stream.open or stream.reader.messages or not stream.held:
            return
        held, stream.held = stream.held, 0
        self._credit_connection(held)
        if not stream.remote_closed and (increment := stream.window.give(held)):
            self.put(frames.window_update(stream.number, increment))

    def _credit_connection(self, byte_size: int) -> None:
        if (increment := self.window.give(byte_size)) and not self.failed:
            self.put(frames.window_update(0, increment))

    def open_connection_window(self, increment: int) -> None:
        if not increment:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
        self.send_window += increment
        if self.send_window > frames.MAX_WINDOW:
            raise ConnectionFailure(H2ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")

    def take_settings(self, payload: memoryview) -> None:
        """Note what the client can take, and acknowledge it. Raises `ConnectionFailure`."""
        for setting, value in frames.settings_of(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                self._set_initial_window(value)
            elif setting == Setting.MAX_FRAME_SIZE:
                if not frames.DEFAULT_MAX_FRAME_BYTE_SIZE <= value <= frames.LARGEST_MAX_FRAME_BYTE_SIZE:
                    raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
                self.max_frame_byte_size = min(value, limits.MAX_FRAME_BYTE_SIZE)
            elif setting == Setting.ENABLE_PUSH and value > 1:
                raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
        self.put_control(frames.SETTINGS_ACK)

    def _set_initial_window(self, byte_size: int) -> None:
        if byte_size > frames.MAX_WINDOW:
            raise ConnectionFailure(H2ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {byte_size}")
        change = byte_size - self.initial_send_window
        self.initial_send_window = byte_size
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                raise ConnectionFailure(H2ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is too large")

    # ---- bytes out ---------------------------------------------------------------------------

    def put(self, octets: Buffer) -> None:
        self._outbox.append(octets)
        self.outbox_byte_size += len(octets)

    def put_control(self, octets: bytes) -> None:
        """Put out what says nothing about calls: pings and acknowledgements."""
        self.put(octets)
        self._taken_byte_size -= len(octets)

    @property
    def sent_byte_size(self) -> int:
        """How much was put out so far, but for what says nothing about calls."""
        return self._taken_byte_size + self.outbox_byte_size

    def take_output(self) -> list[Buffer]:
        """Return what is to be written now. It may be memory that `releases` give back."""
        octets, self._outbox = self._outbox, []
        self._taken_byte_size += self.outbox_byte_size
        self.outbox_byte_size = 0
        return octets

    def pump(self, byte_size: int) -> bool:
        """Put out about `byte_size` bytes of waiting output; returns whether more could be sent at once."""
        while self.waiting:
            sent = 0
            for stream in tuple(self.waiting.values()):
                sent += self._send_frame(stream)
                if self.outbox_byte_size >= byte_size:
                    return bool(self.waiting)
            if not sent:
                break
        return False

    def _send_frame(self, stream: Stream) -> int:
        """Send what a stream may send in one frame; returns how much was done, in bytes, 0 for nothing."""
        output, number = stream.output, stream.number
        assert output is not None
        size = min(output.byte_size, stream.send_window, self.send_window, self.max_frame_byte_size)
        if size > 0:
            stream.send_window -= size
            self.send_window -= size
            self.put(frames.head(size, frames.DATA, 0, number))
            for part in output.take(size):
                self.put(part)
        if output.byte_size:
            return max(size, 0)
        del self.waiting[number]
        self._close_output(stream)
        if output.trailers is not None:
            self.send_trailers(stream, output.trailers)
        else:
            self.events.append((Event.SENT, stream))
        return 1

    def drop_stalled(self, now_ns: int) -> None:
        """End streams whose client has kept the window shut for too long."""
        for stream in tuple(self.waiting.values()):
            output = stream.output
            assert output is not None
            if output.stalled_ns is None:
                output.stalled_ns = now_ns
            elif now_ns - output.stalled_ns >= limits.PROGRESS_TIMEOUT_S * 10**9:
                self.reset(stream, H2ErrorCode.CANCEL)
                self.events.append((Event.CLOSED, stream))

    # ---- the end -----------------------------------------------------------------------------

    def go_away(self, text: str = "") -> None:
        """Ask the client to start no more calls; those that run, or are on their way, go on."""
        self.put(frames.goaway(frames.NUMBER_MASK, H2ErrorCode.NO_ERROR, text))

    def fail(self, code: H2ErrorCode, text: str = "") -> None:
        """End the connection: nothing is received or sent behind this GOAWAY."""
        if self.failed:
            return
        self.failed = True
        self.put(frames.goaway(self.last_number, code, text))
        self.close()

    def close(self) -> None:
        """The connection is gone: no stream can be answered any more."""
        self.failed = True
        for stream in tuple(self.streams.values()):
            self.forget(stream)
            self.events.append((Event.CLOSED, stream))
