"""Moves bytes between sockets and the state of an attacker's connections, in one thread.

An `Exchange` is the state of one connection: bytes to send, what was received, how it ended. It does no I/O.
`GrpcExchange` is one over HTTP/2 with flow control, whose messages are bytes already.
"""

from __future__ import annotations

import contextlib
import math
import re
import select
import socket
import struct
import time
import urllib.parse
from collections import deque
from typing import TYPE_CHECKING

import hpack

from bench.load import (
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

    from bench.heavy.attack import GrpcCall, HttpRequest

_WRITE_BYTE_SIZE, _READ_BYTE_SIZE = 1 << 20, 1 << 18

#: How much of a response's body is kept.
TEXT_BYTE_SIZE = 4096


class Exchange:
    """One connection of an attacker. Subclasses queue what they send in `outgoing`."""

    def __init__(self) -> None:
        self.outgoing: deque[memoryview] = deque()
        #: The status of each response that is complete.
        self.statuses: list[str] = []
        #: The beginning of the last body or message, of each response.
        self.texts: list[str] = []
        self.response_byte_size = 0
        self.finished = False
        #: Whether what the server sends is read.
        self.reads = True

    def receive(self, data: bytes) -> None:
        """Take received bytes."""
        raise NotImplementedError("a subclass knows the protocol")

    def refill(self) -> None:
        """Queue more in `outgoing`, if there is more and the peer allows it."""

    def go_on(self) -> None:
        """End the pause: send the rest, read what comes."""

    def closed(self, reason: str) -> None:
        """The connection has ended."""
        if not self.finished:
            self.end(reason, "")

    def end(self, status: str, text: str) -> None:
        """The last response is complete."""
        self.statuses.append(status)
        self.texts.append(text)
        self.finished = True

    def to_send(self) -> memoryview | None:
        """Return the next bytes that may be sent."""
        if not self.outgoing:
            self.refill()
        return self.outgoing[0][:_WRITE_BYTE_SIZE] if self.outgoing else None

    def sent(self, byte_size: int) -> None:
        first = self.outgoing[0]
        if byte_size == len(first):
            self.outgoing.popleft()
        else:
            self.outgoing[0] = first[byte_size:]


_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)

_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.IGNORECASE)

_LAST_CHUNK = b"0\r\n\r\n"


class HttpExchange(Exchange):
    """HTTP/1.1, one request after the other."""

    def __init__(self, requests: Sequence[HttpRequest], *, keeps_end: bool = False, reads: bool = True) -> None:
        """Until `go_on`, `keeps_end` keeps the last byte of the only request back, and without `reads` nothing is
        read."""
        super().__init__()
        self.reads = reads
        self._requests = deque(requests)
        self._body: list[memoryview] = []
        self._head = bytearray()
        self._text = bytearray()
        self._tail = b""
        self._status = ""
        #: Bytes of the response's body that are missing; -1 if it is chunked.
        self._missing = 0
        self._begin(self._requests.popleft())
        self._kept = memoryview(b"")
        if keeps_end:
            last = self.outgoing[-1]
            self.outgoing[-1], self._kept = last[:-1], last[-1:]

    def go_on(self) -> None:
        self.reads = True
        if self._kept:
            self.outgoing.append(self._kept)
            self._kept = memoryview(b"")

    def _begin(self, request: HttpRequest) -> None:
        length = "Transfer-Encoding: chunked" if request.chunk_byte_size else f"Content-Length: {len(request.body)}"
        headers = [f"{name}: {value}" for name, value in request.headers.items()]
        if request.expects_continue:
            headers.append("Expect: 100-continue")
        lines = [f"POST {request.path} HTTP/1.1", "Host: localhost", length, *headers]
        self.outgoing.append(memoryview(("\r\n".join(lines) + "\r\n\r\n").encode()))
        body = [memoryview(request.body)] if request.body else []
        if request.chunk_byte_size:
            body = [memoryview(chunked(request.body, request.chunk_byte_size))]
        if request.expects_continue:
            self._body = body
        else:
            self.outgoing += body

    def receive(self, data: bytes) -> None:
        if not self._status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = bytes(self._head[: end + 2]), bytes(self._head[end + 4 :])
            self._head.clear()
            status = head.split(b" ", 2)[1].decode(errors="replace")
            if status == "100":
                self.outgoing += self._body
                self._body = []
                if data:
                    self.receive(data)
                return
            self._status = status
            length = _LENGTH.search(head)
            self._missing = -1 if _CHUNKED.search(head) else int(length[1]) if length else 0
        self._receive_body(data)

    def _receive_body(self, data: bytes) -> None:
        self.response_byte_size += len(data)
        self._text += data[: TEXT_BYTE_SIZE - len(self._text)]
        if self._missing < 0:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]  # JSON has no line ends, so this is its end
            complete = self._tail == _LAST_CHUNK
        else:
            self._missing -= len(data)
            complete = self._missing <= 0
        if complete:
            self._respond()

    def _respond(self) -> None:
        status, text = self._status, self._text.decode(errors="replace")
        self._status, self._tail = "", b""
        self._text.clear()
        if not self._requests or self.outgoing or self._body:  # refused before all was sent
            self.end(status, text)
            return
        self.statuses.append(status)
        self.texts.append(text)
        self._begin(self._requests.popleft())

    def closed(self, reason: str) -> None:
        if self._status and not self.finished:
            self.end(f"{self._status} cut short", self._text.decode(errors="replace"))
        super().closed(reason)


def chunked(body: bytes, chunk_byte_size: int) -> bytes:
    """Return a body in chunks of a size."""
    parts: list[bytes] = []
    for start in range(0, len(body), chunk_byte_size):
        part = body[start : start + chunk_byte_size]
        parts += (b"%x\r\n" % len(part), part, b"\r\n")
    return b"".join([*parts, _LAST_CHUNK])


class Connections:
    """The sockets of exchanges to one port. The owner calls `close`."""

    def __init__(self, port: int, exchanges: Sequence[Exchange]) -> None:
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, Exchange]] = {}
        for exchange in exchanges:
            each = socket.create_connection(("127.0.0.1", port), timeout=30)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setblocking(False)
            self._open[each.fileno()] = (each, exchange)
            self._poll.register(each, 0)

    def drive(self, deadline: float, idle_s: float = math.inf) -> None:
        """Send and receive until each exchange has finished, until `deadline`, or until nothing moved for `idle_s`.

        The deadline is a time of `time.perf_counter`.
        """
        moved = now = time.perf_counter()
        while self._open and now < min(deadline, moved + idle_s):
            for descriptor, (_, exchange) in self._open.items():
                writes = exchange.to_send() is not None
                self._poll.modify(descriptor, select.EPOLLOUT * writes | select.EPOLLIN * exchange.reads)
            events = self._poll.poll(0.05)
            for descriptor, event in events:
                self._serve(descriptor, event)
            now = time.perf_counter()
            if events:
                moved = now

    def go_on(self) -> None:
        """End the pause of all exchanges."""
        for _, exchange in self._open.values():
            exchange.go_on()

    def _serve(self, descriptor: int, event: int) -> None:
        connection, exchange = self._open[descriptor]
        ended = ""
        try:
            if event & select.EPOLLOUT and (part := exchange.to_send()) is not None:
                exchange.sent(connection.send(part))
            if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                ended = _receive(connection, exchange)
        except BlockingIOError:
            pass
        except ConnectionError:
            ended = _receive_rest(connection, exchange) or "reset"
        if ended:
            exchange.closed(ended)
        if exchange.finished:
            self._poll.unregister(descriptor)
            connection.close()
            del self._open[descriptor]

    def close(self) -> None:
        for connection, exchange in self._open.values():
            exchange.closed("no response in time")
            connection.close()
        self._open.clear()
        self._poll.close()


def _receive(connection: socket.socket, exchange: Exchange) -> str:
    """Read once. Returns how the connection has ended, nothing if it has not."""
    data = connection.recv(_READ_BYTE_SIZE)
    if not data:
        return "closed"
    exchange.receive(data)
    return ""


def _receive_rest(connection: socket.socket, exchange: Exchange) -> str:
    """Read what had come before the connection was reset. Returns how it has ended."""
    ended = ""
    with contextlib.suppress(OSError):
        while not ended and not exchange.finished:
            ended = _receive(connection, exchange)
    return ended


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
