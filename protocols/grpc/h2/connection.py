"""The server side of one HTTP/2 connection, without its socket: the parts and how they belong together. Pure.

    bytes ──▶ ReceivingHalf ──▶ StreamFrames ───────▶ Streams: events ──▶ calls
                   │                                     ▲                  │
                   │ acknowledgements, GOAWAY            │ DATA_SENT        │ responses
                   ▼                                     │                  ▼
    bytes ◀── WriteQueue ◀─────────────────────────── SendingHalf ◀─────────┘

Both halves share `Streams` (streams.py) and, of the same file, the connection's `ReceiveWindow` and the
`PeerLimits`. What a client may send in which state is in states.py, how much of it in limits.py.

The order of use: `receiving.receive`, handle `streams.events`, respond with `sending`, `sending.pump`, write what
`sending.write_queue.take` returns, and call `sending.releases` when it has been written.

`ReceivingHalf` stands here: it makes frames of bytes, and owns the state of the connection
(`states.ConnectionState`) and header blocks. Frames of streams go to stream_frames.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTE_SIZE,
    GOAWAY,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITY_FLAG,
    RST_STREAM,
    SETTINGS,
    STREAM_ID_MASK,
    WINDOW_UPDATE,
    ConnectionFailure,
    H2ErrorCode,
)
from protocols.grpc.h2.headers import RequestHeadDecoder
from protocols.grpc.h2.limits import FloodCounters
from protocols.grpc.h2.sending import SendingHalf
from protocols.grpc.h2.states import ConnectionState, check_frame_header, connection_state_after
from protocols.grpc.h2.stream_frames import StreamFrames
from protocols.grpc.h2.streams import PeerLimits, ReceiveWindow, Streams

if TYPE_CHECKING:
    from protocols.grpc.framing import MessageMemory
    from protocols.grpc.h2.limits import KeepaliveRules

# Names of this module are found faster than members of an enum (states.py).
_AWAITING_PREFACE = ConnectionState.AWAITING_PREFACE

_OPEN = ConnectionState.OPEN


class UnfinishedHeaderBlock(msgspec.Struct):
    """A header block that continues in CONTINUATION frames."""

    stream_id: int
    end_stream: bool
    octets: bytearray
    continuation_count: int = 0


class ReceivingHalf:
    """Ends the connection through `sending` if a frame violates RFC 9113 or `limits.py`."""

    def __init__(
        self,
        streams: Streams,
        peer: PeerLimits,
        receive_window: ReceiveWindow,
        sending: SendingHalf,
        rules: KeepaliveRules | None,
    ) -> None:
        """`receive_window` is the connection's."""
        #: Whether `receive` stopped with complete frames left, so that other connections are served before.
        self.has_more = False
        #: How many of the server's pings the client has acknowledged, and `Streams.last_id` at the last of them.
        self.ping_ack_count = 0
        self.ping_ack_last_id = 0
        self._streams = streams
        self._peer = peer
        self._sending = sending
        self._floods = FloodCounters(rules)
        self._decoder = RequestHeadDecoder()
        self.stream_frames = StreamFrames(streams, peer, receive_window, sending, self._floods, self._decoder)
        self._state = ConnectionState.AWAITING_PREFACE
        self._header_block: UnfinishedHeaderBlock | None = None
        #: How many bytes of a frame that means nothing have not arrived.
        self._skipped_left = 0
        #: When the handshake or a header block was first seen incomplete.
        self._waiting_ns: int | None = None

    @property
    def state(self) -> ConnectionState:
        return ConnectionState.CLOSED if self._sending.ended else self._state

    def receive(self, data: memoryview, now_ns: int, max_frames: int = limits.FRAMES_PER_READ) -> int:
        """Take frames from `data`; returns how many bytes were taken.

        The rest has to be handed in again, with what follows it. The payload of DATA frames is copied.
        """
        self.has_more = False
        size = len(data)
        if self._sending.ended:
            return size
        self._floods.now_ns = now_ns
        stream_frames = self.stream_frames
        position = 0
        try:
            if self._state is _AWAITING_PREFACE and not (position := self._take_preface(data)):
                return 0
            for _ in range(max_frames):
                if stream_frames.unfinished is not None:
                    position += stream_frames.take_data(data[position:])
                    if stream_frames.unfinished is not None:
                        return position
                if self._skipped_left:
                    position += self._skip(size - position)
                if size - position < FRAME_HEADER_BYTE_SIZE:
                    return position
                high, low, frame_type, flags, stream_id = FRAME_HEADER.unpack_from(data, position)
                byte_size = high << 8 | low
                stream_id &= STREAM_ID_MASK
                end = 0
                if self._state is _OPEN:  # usual frames, in one step each
                    if frame_type == HEADERS and flags == END_HEADERS:
                        payload = position + FRAME_HEADER_BYTE_SIZE
                        end = stream_frames.take_complete_call(data, payload, payload + byte_size, stream_id)
                        if stream_frames.unfinished is not None:  # its call says where the rest belongs
                            return end
                    elif frame_type == WINDOW_UPDATE and byte_size == 4:
                        end = stream_frames.take_complete_window_update(data, position, stream_id)
                    elif frame_type == DATA and not flags:
                        end = stream_frames.take_complete_message(
                            data, position, stream_id
                        ) or stream_frames.take_parts_of_message(data, position, stream_id)
                if not end:
                    end = self._take_frame(
                        data, position + FRAME_HEADER_BYTE_SIZE, frame_type, flags, stream_id, byte_size
                    )
                    if not end:
                        return position
                position = end
            self.has_more = position < size
        except ConnectionFailure as failure:
            self._sending.fail(failure.code, failure.text)
            return size
        return position

    def _take_preface(self, data: memoryview) -> int:
        """Return where the preface ends, 0 as long as it is incomplete."""
        received = bytes(data[: len(PREFACE)])
        if not PREFACE.startswith(received):
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2")
        if len(received) < len(PREFACE):
            return 0
        self._state = ConnectionState.AWAITING_SETTINGS
        return len(received)

    def _skip(self, byte_size: int) -> int:
        """Drop the payload of a frame that means nothing; returns how many of the next `byte_size` bytes that is."""
        skipped = min(self._skipped_left, byte_size)
        self._skipped_left -= skipped
        return skipped

    def _take_frame(
        self, data: memoryview, start: int, frame_type: int, flags: int, stream_id: int, byte_size: int
    ) -> int:
        """Take a frame whose payload begins at `start`; returns where it ends, 0 where more must arrive before.

        The payloads of DATA and of frames that mean nothing are taken later, as they arrive.
        """
        next_state = connection_state_after(self._state, frame_type, flags)
        check_frame_header(frame_type, flags, stream_id, byte_size)
        if frame_type == DATA:
            padded = flags & PADDED and byte_size
            if padded and len(data) == start:
                return 0
            self.stream_frames.begin_data(stream_id, flags, byte_size, data[start] if padded else 0)
            return start + 1 if flags & PADDED else start
        if frame_type > CONTINUATION or frame_type == GOAWAY:
            self._floods.useless_frame()
            self._skipped_left = byte_size
            return start
        end = start + byte_size
        if end > len(data):
            return 0
        payload = data[start:end]
        if frame_type == HEADERS:
            self._take_headers(flags, stream_id, payload)
        elif frame_type == WINDOW_UPDATE:
            self.stream_frames.take_window_update(stream_id, frames.uint32(payload) & MAX_WINDOW)
        elif frame_type == RST_STREAM:
            self.stream_frames.take_rst_stream(stream_id)
        elif frame_type == CONTINUATION:
            self._take_continuation(flags, stream_id, payload)
        elif frame_type == PING:
            self._take_ping(flags, payload)
        elif frame_type == SETTINGS:
            self._take_settings(flags, payload)
        else:
            self._floods.useless_frame()  # PRIORITY
        self._state = next_state
        return end

    # ---- frames of the connection, and header blocks -----------------------------------------

    def _take_settings(self, flags: int, payload: memoryview) -> None:
        if not flags & ACK:
            self._floods.settings()
            self._peer.apply_settings(payload, self._streams.by_id.values())
            self._sending.write_queue.put_control(frames.SETTINGS_ACK)

    def _take_ping(self, flags: int, payload: memoryview) -> None:
        if flags & ACK:
            self.ping_ack_count += 1
            self.ping_ack_last_id = self._streams.last_id
            return
        queue = self._sending.write_queue
        self._floods.ping(has_calls=bool(self._streams.by_id), sent_byte_size=queue.sent_byte_size)
        queue.put_control(frames.ping_ack(payload))

    def _take_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        start, end = 0, len(payload)
        if flags & PADDED and end:
            start, end = 1, end - payload[0]
        if flags & PRIORITY_FLAG:
            start += 5
        if start > end:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "more padding than HEADERS")
        block, end_stream = bytes(payload[start:end]), bool(flags & END_STREAM)
        if flags & END_HEADERS:
            # Decoded also where the frame is ignored then: that changes the HPACK table.
            self.stream_frames.take_headers(stream_id, self._decoder.decode(block), end_stream=end_stream)
        else:
            self._header_block = UnfinishedHeaderBlock(stream_id, end_stream, bytearray(block))

    def _take_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        block = self._header_block
        assert block is not None, "there is one in this state of the connection"
        if stream_id != block.stream_id:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "a header block was not continued")
        block.continuation_count += 1
        block.octets += payload
        if (
            block.continuation_count > limits.MAX_CONTINUATION_FRAMES
            or len(block.octets) > limits.MAX_HEADER_BLOCK_BYTE_SIZE
        ):
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & END_HEADERS:
            self._header_block = None
            request_head = self._decoder.decode(bytes(block.octets))
            self.stream_frames.take_headers(stream_id, request_head, end_stream=block.end_stream)

    # ---- clients that are too slow -----------------------------------------------------------

    def is_too_slow(self, now_ns: int) -> bool:
        """Whether the handshake or a header block has been incomplete for too long. Called now and then."""
        if self._state is ConnectionState.OPEN:
            self._waiting_ns = None
        elif self._waiting_ns is None:
            self._waiting_ns = now_ns
        return self._waiting_ns is not None and now_ns - self._waiting_ns >= limits.HANDSHAKE_TIMEOUT_S * 10**9


class H2Connection:
    """The parts of one connection."""

    def __init__(self, rules: KeepaliveRules | None = None, memory: MessageMemory | None = None) -> None:
        receive_window = ReceiveWindow(limits.CONNECTION_WINDOW_BYTE_SIZE)
        self.peer_limits = PeerLimits()
        self.streams = Streams(memory)
        self.sending = SendingHalf(self.streams, self.peer_limits, receive_window)
        self.receiving = ReceivingHalf(self.streams, self.peer_limits, receive_window, self.sending, rules)

    def check_progress(self, now_ns: int) -> None:
        """End what has waited for the client too long: handshake, header blocks, and output. Called now and then."""
        if self.sending.ended:
            return
        if self.receiving.is_too_slow(now_ns):
            self.sending.fail(H2ErrorCode.PROTOCOL_ERROR, "the client is too slow")
        else:
            self.sending.reset_stalled(now_ns)
