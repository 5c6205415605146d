"""An attacker's connection over gRPC: HTTP/2 with flow control, and messages that are bytes already. No I/O."""

from __future__ import annotations

import struct
import urllib.parse
from collections import deque
from typing import TYPE_CHECKING

import hpack

from bench.heavy.exchange import TEXT_BYTE_SIZE, Exchange
from bench.load_clients import (
    ACK,
    CLIENT_PREFACE,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    WINDOW_UPDATE,
    frame,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.heavy.attack import GrpcCall

_INITIAL_WINDOW, _MAX_FRAME = 0x4, 0x5
_CONTINUATION, _PADDED = 0x9, 0x8
#: HTTP/2's own values, before the server's settings have come.
_WINDOW_BYTE_SIZE, _FRAME_BYTE_SIZE = 65535, 16384

#: Names of the statuses that servers respond with.
STATUSES = {
    "0": "OK", "1": "CANCELLED", "2": "UNKNOWN", "3": "INVALID_ARGUMENT", "4": "DEADLINE_EXCEEDED", "5": "NOT_FOUND",
    "6": "ALREADY_EXISTS", "7": "PERMISSION_DENIED", "8": "RESOURCE_EXHAUSTED", "12": "UNIMPLEMENTED",
    "13": "INTERNAL", "14": "UNAVAILABLE",
}  # fmt: skip


class _Call:
    """One stream: what is left to send, and what has come."""

    def __init__(self, messages: Sequence[bytes], *, compressed: bool, window: int) -> None:
        self.parts: deque[memoryview] = deque()
        for message in messages:
            self.parts.append(memoryview(struct.pack(">?I", compressed, len(message))))
            if message:
                self.parts.append(memoryview(message))
        self.window = window
        self.text = bytearray()
        self.headers: dict[str, str] = {}


class GrpcExchange(Exchange):
    """All calls begin at once, each on a stream of its own."""

    def __init__(self, calls: Sequence[GrpcCall], *, keeps_end: bool = False, reads: bool = True) -> None:
        """Until `go_on`, `keeps_end` keeps the last part of each call back, and without `reads` the server may send
        no message: the window of each stream is 0."""
        super().__init__()
        self._keeps_end = keeps_end
        self._opens_windows = not reads
        self._buffer = bytearray()
        self._block = b""
        self._decoder = hpack.Decoder()
        self._decoder.max_header_list_size = 1 << 30
        self._window, self._stream_window, self._frame = _WINDOW_BYTE_SIZE, _WINDOW_BYTE_SIZE, _FRAME_BYTE_SIZE
        self._calls: dict[int, _Call] = {}
        self._sending: deque[int] = deque()
        settings = struct.pack(">HIHIHI", 0x1, 0, 0x2, 0, _INITIAL_WINDOW, WINDOW if reads else 0)
        window = struct.pack(">I", WINDOW - _WINDOW_BYTE_SIZE)
        first = CLIENT_PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window)
        for index, call in enumerate(calls):
            stream = 2 * index + 1
            first += frame(HEADERS, END_HEADERS, stream, _header_block(call))
            self._calls[stream] = _Call(call.messages, compressed=bool(call.encoding), window=_WINDOW_BYTE_SIZE)
            self._sending.append(stream)
        self.outgoing.append(memoryview(first))

    def go_on(self) -> None:
        self._keeps_end = False
        if self._opens_windows:
            self._opens_windows = False
            self.outgoing.append(memoryview(frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, WINDOW))))

    def refill(self) -> None:
        for _ in range(len(self._sending)):
            stream = self._sending.popleft()
            call = self._calls.get(stream)
            if call is None:
                continue  # it has its response already
            part = self._next_part(call)
            if part is None or call.parts:
                self._sending.append(stream)
            if part is None:
                continue
            self._queue_data(stream, part, END_STREAM * (not call.parts))
            return

    def _next_part(self, call: _Call) -> memoryview | None:
        """Return the next part of a call that may be sent now."""
        if not call.parts:
            return memoryview(b"")  # a call without messages
        part = call.parts[0][: max(0, min(self._window, call.window, self._frame))]
        if not len(part) or (self._keeps_end and len(call.parts) == 1 and len(part) == len(call.parts[0])):
            return None
        call.parts[0] = call.parts[0][len(part) :]
        if not len(call.parts[0]):
            call.parts.popleft()
        call.window -= len(part)
        self._window -= len(part)
        return part

    def _queue_data(self, stream: int, part: memoryview, flags: int) -> None:
        self.outgoing.append(memoryview(struct.pack(">I", len(part))[1:] + struct.pack(">BBI", DATA, flags, stream)))
        if len(part):
            self.outgoing.append(part)

    def receive(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        position = 0
        while len(buffer) - position >= 9:
            length = int.from_bytes(buffer[position : position + 3])
            end = position + 9 + length
            if len(buffer) < end:
                break
            kind, flags, stream = struct.unpack_from(">BBI", buffer, position + 3)
            self._take(kind, flags, stream, bytes(memoryview(buffer)[position + 9 : end]))
            position = end
        del buffer[:position]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self.response_byte_size += len(payload)
            if (call := self._calls.get(stream)) is not None:
                call.text += payload[: TEXT_BYTE_SIZE - len(call.text)]
                if flags & END_STREAM:
                    self._end_call(stream, "no trailers", "")
        elif kind in (HEADERS, _CONTINUATION):
            self._take_headers(flags, stream, payload)
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
        elif kind == WINDOW_UPDATE:
            increment = int.from_bytes(payload)
            if not stream:
                self._window += increment
            elif stream in self._calls:
                self._calls[stream].window += increment
        elif kind == PING and not flags & ACK:
            self.outgoing.append(memoryview(frame(PING, ACK, 0, payload)))
        elif kind == RST_STREAM:
            if stream in self._calls:
                self._end_call(stream, f"RST_STREAM {int.from_bytes(payload)}", "")
        elif kind == GOAWAY:
            text = payload[8:].decode(errors="replace")
            code = int.from_bytes(payload[4:8])
            if code:
                for each in [*self._calls]:
                    self._end_call(each, f"GOAWAY {code}", text)

    def _take_settings(self, payload: bytes) -> None:
        for identifier, value in struct.iter_unpack(">HI", payload):
            if identifier == _INITIAL_WINDOW:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
            elif identifier == _MAX_FRAME:
                self._frame = value
        self.outgoing.append(memoryview(frame(SETTINGS, ACK, 0, b"")))

    def _take_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & _PADDED:
            raise ValueError("the attacker does not read padded headers")
        self._block += payload
        if not flags & END_HEADERS:
            return
        block, self._block = self._block, b""
        self.response_byte_size += len(block)
        headers = {str(name): str(value) for name, value in (each[:2] for each in self._decoder.decode(block))}
        call = self._calls.get(stream)
        if call is not None:
            call.headers |= headers
            if "grpc-status" in headers:
                message = urllib.parse.unquote(headers.get("grpc-message", ""))
                self._end_call(stream, STATUSES.get(headers["grpc-status"], headers["grpc-status"]), message)

    def _end_call(self, stream: int, status: str, message: str) -> None:
        call = self._calls.pop(stream)
        text = message or bytes(call.text).decode(errors="replace")
        self.statuses.append(status)
        self.texts.append(text)
        self.finished = not self._calls

    def closed(self, reason: str) -> None:
        for stream in [*self._calls]:
            self._end_call(stream, reason, "")
        self.finished = True


def _header_block(call: GrpcCall) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    encoding = [("grpc-encoding", call.encoding)] if call.encoding else []
    return encoder.encode([
        (":method", "POST"), (":scheme", "http"), (":path", call.path), (":authority", "localhost"), ("te", "trailers"),
        ("content-type", "application/grpc"), *encoding, *call.headers.items(),
    ])  # fmt: skip
