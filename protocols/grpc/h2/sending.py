"""The sending half of a connection: responses within the client's windows, and control frames. Pure.

A small response leaves in one piece; what does not fit into the client's windows waits in its stream, and `pump`
sends it as the windows open: where several streams wait, one frame of each after the other.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from protocols.grpc.framing import PREFIX
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import H2ErrorCode, Setting
from protocols.grpc.h2.headers import OK_TRAILERS, OK_TRAILERS_BLOCK, RESPONSE_BLOCK
from protocols.grpc.h2.states import StreamState
from protocols.grpc.h2.streams import PendingData, StreamEvent
from protocols.request_limits import COPIED_RESPONSE_BYTE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from protocols.grpc.h2.headers import Trailers
    from protocols.grpc.h2.streams import PeerLimits, ReceiveWindow, Stream, Streams
    from shm.tensor import Buffer

# Names of this module are found faster than members of an enum (states.py).
_CLOSED = StreamState.CLOSED
_HALF_CLOSED_REMOTE = StreamState.HALF_CLOSED_REMOTE

#: While more bytes than this wait to be written, small responses wait in their streams, too.
_FULL_QUEUE_BYTE_SIZE = 2**20

#: The start of a response: HEADERS, the frame header of DATA, the prefix of the message.
_RESPONSE_START = struct.Struct(f">HBBBL{len(RESPONSE_BLOCK)}sHBBBLBL")
#: The frame header of DATA and the prefix of its message.
_MESSAGE_START = struct.Struct(">HBBBLBL")
_TRAILERS = struct.Struct(f">HBBBL{len(OK_TRAILERS_BLOCK)}s")
_END_HEADERS_AND_STREAM = frames.END_HEADERS | frames.END_STREAM

#: The server's connection preface (RFC 9113, 3.4), with the window of the connection.
_SERVER_PREFACE = frames.settings(
    [
        (Setting.MAX_CONCURRENT_STREAMS, limits.MAX_CONCURRENT_STREAMS),
        (Setting.INITIAL_WINDOW_SIZE, limits.STREAM_WINDOW_BYTE_SIZE),
        (Setting.MAX_FRAME_SIZE, limits.MAX_FRAME_BYTE_SIZE),
        (Setting.MAX_HEADER_LIST_SIZE, limits.MAX_HEADER_LIST_BYTE_SIZE),
    ]
) + frames.window_update(0, limits.CONNECTION_WINDOW_BYTE_SIZE - frames.DEFAULT_WINDOW_BYTE_SIZE)


class WriteQueue:
    """Frames in the order in which they are written, until the socket gets them."""

    __slots__ = ("_frames", "_taken_byte_size", "byte_size")

    def __init__(self) -> None:
        self._frames: list[Buffer] = []
        self._taken_byte_size = 0
        #: How much waits to be taken.
        self.byte_size = 0

    def put(self, octets: Buffer) -> None:
        """Add a frame, a part of one, or several."""
        self._frames.append(octets)
        self.byte_size += len(octets)

    def put_pieces(self, pieces: Iterable[Buffer], byte_size: int) -> None:
        """Add frames in any number of pieces, `byte_size` bytes together."""
        self._frames += pieces
        self.byte_size += byte_size

    def put_control(self, octets: bytes) -> None:
        """Add pings and acknowledgements, which are no sign that calls make progress."""
        self.put(octets)
        self._taken_byte_size -= len(octets)

    @property
    def sent_byte_size(self) -> int:
        """How much was put so far, without what `put_control` added."""
        return self._taken_byte_size + self.byte_size

    def take(self) -> list[Buffer]:
        """Return what is to be written now."""
        octets, self._frames = self._frames, []
        self._taken_byte_size += self.byte_size
        self.byte_size = 0
        return octets


class SendingHalf:
    """Puts frames into `write_queue`. Methods with a `stream` need one that is open; afterwards see its `state`."""

    def __init__(self, streams: Streams, peer: PeerLimits, receive_window: ReceiveWindow) -> None:
        """`receive_window` is the connection's."""
        self.write_queue = WriteQueue()
        self.write_queue.put(_SERVER_PREFACE)
        #: Whether the connection has ended: its GOAWAY is the last frame, or the socket is gone.
        self.ended = False
        #: What to call, in any order, when all output that was taken so far has been written.
        self.releases: list[Callable[[], None]] = []
        #: Streams with data that waits to be sent, by their ids.
        self.waiting: dict[int, Stream] = {}
        self._streams = streams
        self._peer = peer
        self._receive_window = receive_window

    # ---- responses ---------------------------------------------------------------------------

    def respond(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None = None) -> None:
        """Send one message, whose bytes are `parts`, with headers before and the status OK behind it.

        `release` is called when the parts are not used any more, possibly before this returns, or is put into
        `releases`.
        """
        byte_size = sum(map(len, parts))
        size = byte_size + PREFIX.size
        peer, queue = self._peer, self.write_queue
        if (
            size > stream.send_window
            or size > peer.send_window
            or size > peer.max_frame_byte_size
            or queue.byte_size >= _FULL_QUEUE_BYTE_SIZE
        ):
            self.send_headers(stream, RESPONSE_BLOCK)
            self.send_data(stream, [PREFIX.pack(0, byte_size), *parts], release)
            self.send_trailers(stream, OK_TRAILERS)
            return
        stream_id = stream.id
        peer.send_window -= size
        start = _RESPONSE_START.pack(
            0, len(RESPONSE_BLOCK), frames.HEADERS, frames.END_HEADERS, stream_id, RESPONSE_BLOCK,
            size >> 8, size & 0xFF, frames.DATA, 0, stream_id, 0, byte_size,
        )  # fmt: skip
        end = _TRAILERS.pack(
            0, len(OK_TRAILERS_BLOCK), frames.HEADERS, _END_HEADERS_AND_STREAM, stream_id, OK_TRAILERS_BLOCK
        )
        if byte_size <= COPIED_RESPONSE_BYTE_SIZE:
            queue.put(b"".join((start, *parts, end)))
            if release is not None:
                release()
        else:
            queue.put_pieces((start, *parts, end), len(start) + byte_size + len(end))
            if release is not None:
                self.releases.append(release)
        self._end_response(stream)

    def send_headers(self, stream: Stream, block: bytes) -> None:
        """Send headers that do not end the stream."""
        assert stream.state is not _CLOSED, "nothing is sent on a closed stream"
        stream.headers_sent = True
        max_byte_size = self._peer.max_frame_byte_size
        self.write_queue.put(frames.headers(stream.id, block, max_byte_size=max_byte_size, end_stream=False))

    def send_data(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None = None) -> None:
        """Send `parts` as windows allow; `StreamEvent.DATA_SENT` says when they have left.

        No more may be given before that. `release` is called, or put into `releases`, also if the stream is closed
        before.
        """
        assert stream.state is not _CLOSED, "nothing is sent on a closed stream"
        if stream.pending is None:
            stream.pending = PendingData()
        stream.pending.add(parts, release)
        self.waiting[stream.id] = stream

    def send_message(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None) -> bool:
        """Send a message, whose bytes are `parts`; returns whether it has left, as small ones usually do.

        Otherwise it waits for windows, as by `send_data`, and no other may be sent before it has left.
        """
        byte_size = sum(map(len, parts))
        size = byte_size + PREFIX.size
        peer, queue = self._peer, self.write_queue
        if (
            size > COPIED_RESPONSE_BYTE_SIZE
            or size > stream.send_window
            or size > peer.send_window
            or size > peer.max_frame_byte_size
            or queue.byte_size >= _FULL_QUEUE_BYTE_SIZE
        ):
            self.send_data(stream, [PREFIX.pack(0, byte_size), *parts], release)
            return False
        stream.send_window -= size
        peer.send_window -= size
        start = _MESSAGE_START.pack(size >> 8, size & 0xFF, frames.DATA, 0, stream.id, 0, byte_size)
        queue.put(b"".join((start, *parts)))
        if release is not None:
            release()
        return True

    def drop_data(self, stream: Stream) -> None:
        """Drop data that has not left, because the trailers will say that the call has failed."""
        if self.waiting.pop(stream.id, None) is not None:
            self._close_pending(stream)

    def _close_pending(self, stream: Stream) -> None:
        """Drop what is left of a stream's data. What was taken of it may still be waiting for the socket."""
        assert stream.pending is not None
        if (release := stream.pending.take_release()) is not None:
            self.releases.append(release)
        stream.pending.close()

    def send_trailers(self, stream: Stream, trailers: Trailers) -> None:
        """End the response, behind all data; if no headers were sent, the trailers are the headers as well."""
        assert stream.state is not _CLOSED, "nothing is sent on a closed stream"
        if stream.id in self.waiting:
            assert stream.pending is not None
            stream.pending.trailers = trailers
            return
        max_byte_size = self._peer.max_frame_byte_size
        self.write_queue.put(frames.headers(stream.id, trailers.block, max_byte_size=max_byte_size, end_stream=True))
        self._end_response(stream)

    def _end_response(self, stream: Stream) -> None:
        """The server has sent its last frame; a client that is still sending its request need not (RFC 9113, 8.1)."""
        request_ended = stream.state is _HALF_CLOSED_REMOTE
        self.close_stream(stream)
        stream.call = None
        if not request_ended:
            self.put_reset(stream.id, H2ErrorCode.NO_ERROR)

    def reset(self, stream: Stream, code: H2ErrorCode) -> None:
        """End a stream without a response, or in the middle of it."""
        self.close_stream(stream)
        self.put_reset(stream.id, code)

    def close_stream(self, stream: Stream) -> None:
        """The stream has ended in both directions: give back what it holds."""
        stream.state = _CLOSED
        del self._streams.by_id[stream.id]
        if stream.held_byte_size:  # as `give_back`
            increment, stream.held_byte_size = self._receive_window.give_back(stream.held_byte_size), 0
            if increment and not self.ended:
                self.write_queue.put(frames.window_update(0, increment))
        if stream.memory is not None:
            stream.forget_messages()
        if stream.pending is not None:
            self.drop_data(stream)

    def put_reset(self, stream_id: int, code: H2ErrorCode) -> None:
        """Send RST_STREAM for a stream that is closed, or was never opened."""
        self._streams.note_reset(stream_id)
        self.write_queue.put(frames.rst_stream(stream_id, code))

    # ---- the client's windows to send --------------------------------------------------------

    def consumed(self, stream: Stream) -> None:
        """Let the client send more, once all complete messages of `stream` were taken."""
        if stream.state is _CLOSED or stream.message_reader.messages or not stream.held_byte_size:
            return
        held, stream.held_byte_size = stream.held_byte_size, 0
        self.give_back(held)
        if stream.state is StreamState.OPEN and (increment := stream.receive_window.give_back(held)):
            self.write_queue.put(frames.window_update(stream.id, increment))

    def give_back(self, byte_size: int) -> None:
        """Let the client send `byte_size` bytes more on the connection."""
        if (increment := self._receive_window.give_back(byte_size)) and not self.ended:
            self.write_queue.put(frames.window_update(0, increment))

    # ---- data that waits for windows ---------------------------------------------------------

    def pump(self, byte_size: int) -> bool:
        """Put about `byte_size` bytes of waiting data into the queue; returns whether more could be put at once."""
        queue = self.write_queue
        while self.waiting:
            # A stream that waits alone sends many frames in one step.
            most = 0 if len(self.waiting) > 1 else byte_size - queue.byte_size
            sent = 0
            for stream in tuple(self.waiting.values()):
                sent += self._send_frames(stream, most)
                if queue.byte_size >= byte_size:
                    return bool(self.waiting)
            if not sent:
                break
        return False

    def _send_frames(self, stream: Stream, most: int) -> int:
        """Send what a stream may send in `most` bytes, or in one frame; returns how much was done, 0 for nothing."""
        pending, stream_id = stream.pending, stream.id
        assert pending is not None
        peer, queue = self._peer, self.write_queue
        size = min(pending.byte_size, stream.send_window, peer.send_window, max(most, peer.max_frame_byte_size))
        if size > 0:
            stream.send_window -= size
            peer.send_window -= size
            pieces, framed_byte_size = frames.data(stream_id, pending.take(size), peer.max_frame_byte_size)
            queue.put_pieces(pieces, framed_byte_size)
        if pending.byte_size:
            return max(size, 0)
        del self.waiting[stream_id]
        self._close_pending(stream)
        if pending.trailers is not None:
            self.send_trailers(stream, pending.trailers)
        else:
            self._streams.events.append((StreamEvent.DATA_SENT, stream))
        return 1

    def reset_stalled(self, now_ns: int) -> None:
        """Reset streams whose client has kept its windows closed for too long. Called now and then."""
        for stream in tuple(self.waiting.values()):
            pending = stream.pending
            assert pending is not None
            if pending.stalled_ns is None:
                pending.stalled_ns = now_ns
            elif now_ns - pending.stalled_ns >= limits.PROGRESS_TIMEOUT_S * 10**9:
                self.reset(stream, H2ErrorCode.CANCEL)
                self._streams.events.append((StreamEvent.CLOSED, stream))

    # ---- the end of the connection -----------------------------------------------------------

    def go_away(self, text: str = "") -> None:
        """Ask the client to start no more calls; those that run, or are on their way, continue."""
        self.write_queue.put(frames.goaway(frames.STREAM_ID_MASK, H2ErrorCode.NO_ERROR, text))

    def fail(self, code: H2ErrorCode, text: str = "") -> None:
        """End the connection: nothing is received or sent behind this GOAWAY."""
        if self.ended:
            return
        self.ended = True
        self.write_queue.put(frames.goaway(self._streams.last_id, code, text))
        self.close()

    def close(self) -> None:
        """The connection is gone: no stream can get a response any more."""
        self.ended = True
        streams = self._streams
        for stream in tuple(streams.by_id.values()):
            self.close_stream(stream)
            streams.events.append((StreamEvent.CLOSED, stream))
