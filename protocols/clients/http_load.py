"""HTTP/1.1 of one connection of `naiad bench`: prepared bytes out, responses counted and checked. Pure.

A response is not decoded: its status and its length are enough. Heads that have come before are found by their bytes.
The outcomes of received bytes are the same for gRPC (`grpc_load.py`).
"""

from __future__ import annotations

import json
from typing import NamedTuple

#: The response is not complete yet.
INCOMPLETE = 0

#: The last response has arrived, and it is a success.
DONE = 1

#: The request has failed; `error` of the connection's state says why.
FAILED = 2

#: The most bytes of an error that are kept.
MAX_ERROR_BYTE_SIZE = 2048


_MAX_HEAD_BYTE_SIZE = 1 << 16

_MAX_KNOWN_HEADS = 256

#: What a stream of server-sent events has before each event, and in an event that is an error.
_EVENT = b"data: "

_ERROR_EVENT = b'data: {"error"'

#: Responses with these statuses have no body, and none needs a length.
_WITHOUT_BODY = (b"100", b"204", b"304")

_TOO_MUCH = "more bytes than the response has"


class ResponseHead(NamedTuple):
    """What counts of a response's head."""

    status: int
    #: Bytes of the body; None where it comes in chunks, or ends with the connection.
    byte_size: int | None
    #: Whether the connection can take another request.
    keeps_alive: bool
    in_chunks: bool = False


class UnreadableResponse(ValueError):
    """The bytes are no response of HTTP/1.1."""


def connect(head: bytes, *, streaming: bool, has_final: bool) -> HttpLoadState:
    """Return the state of a new connection. `head` and `has_final` are gRPC's."""
    return HttpLoadState(streaming=streaming)


def sequence_id_bytes(sequence_id: int) -> bytes:
    """Return the id of a sequence as it stands in a request: text in JSON."""
    return b"%d" % sequence_id


class HttpLoadState:
    """One connection with at most one request in flight."""

    #: Sent before the first request, and whenever it is not empty. HTTP/1.1 has nothing of this kind.
    pending = b""

    def __init__(self, *, streaming: bool) -> None:
        """`streaming`: the responses are server-sent events, and each counts as one."""
        self._streaming = streaming
        self._known: dict[bytes, ResponseHead] = {}
        self._start = b""
        self._head = ResponseHead(0, 0, keeps_alive=True)
        #: Bytes of the body that are still to come and need not be looked at.
        self.left = 0
        #: The body so far, where it must be looked at: of errors, and in chunks.
        self._body = bytearray()
        self._in_body = False
        self._tail = b""
        self._event_error = b""
        #: Responses of the request in flight so far.
        self.responses = 0
        self.error = ""
        #: Whether the connection can take another request.
        self.usable = True

    def begin(self, request: bytes) -> bytes:
        """Return the bytes that send a request. The response of the last one is complete."""
        self.responses = 0
        return request

    def more(self) -> bytes:
        """Return what can be sent now of a request that has begun: nothing is left."""
        return b""

    def skip(self, byte_size: int) -> int:
        """Take that many bytes of `left`, which nobody looks at. Returns the outcome."""
        self.left -= byte_size
        return self._done() if not self.left else INCOMPLETE

    def feed(self, data: bytes) -> int:
        """Take received bytes. Returns what they mean for the request in flight."""
        if self.left:
            if len(data) > self.left:
                self.left = 0
                return self._broken(_TOO_MUCH)
            self.left -= len(data)
            return self._done() if not self.left else INCOMPLETE
        if self._in_body:
            return self._take_body(data)
        if self._start:
            data = self._start + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._start = data
            return self._broken("a head without end") if len(data) > _MAX_HEAD_BYTE_SIZE else INCOMPLETE
        self._start = b""
        block = data[:end]
        head = self._known.get(block)
        if head is None:
            try:
                head = read_head(block)
            except UnreadableResponse as error:
                return self._broken(str(error))
            if head.status == 100:  # Continue: the response follows
                return self.feed(data[end + 4 :]) if len(data) > end + 4 else INCOMPLETE
            if len(self._known) < _MAX_KNOWN_HEADS:
                self._known[block] = head
        self._head = head
        if head.status == 200 and head.byte_size is not None:
            left = head.byte_size - len(data) + end + 4
            if left < 0:
                return self._broken(_TOO_MUCH)
            self.left = left
            return INCOMPLETE if left else self._done()
        self._in_body = True
        self._body.clear()
        self._tail = self._event_error = b""
        return self._take_body(data[end + 4 :])

    def closed(self) -> int:
        """The server has closed the connection. Returns the outcome of the request in flight."""
        if self._in_body and self._head.byte_size is None and not self._head.in_chunks:
            return self._end_of_body()
        return self._broken("the server closed the connection before its response was complete")

    def _done(self) -> int:
        self.usable = self._head.keeps_alive
        self.responses += 1
        return DONE

    def _broken(self, text: str) -> int:
        self.usable = False
        self.error = text
        return FAILED

    def _take_body(self, data: bytes) -> int:
        self._body += data
        if self._head.byte_size is not None:
            return self._end_of_body() if len(self._body) >= self._head.byte_size else INCOMPLETE
        if not self._head.in_chunks:
            self._take_chunk(bytes(self._body))
            self._body.clear()
            return INCOMPLETE
        while True:
            line_end = self._body.find(b"\r\n")
            if line_end < 0:
                return INCOMPLETE
            try:
                size = int(bytes(self._body[:line_end]).partition(b";")[0], 16)
            except ValueError:
                size = -1
            if size < 0:
                return self._broken("a body whose chunks have no length")
            if len(self._body) < line_end + 2 + size + 2:
                return INCOMPLETE
            chunk = bytes(self._body[line_end + 2 : line_end + 2 + size])
            del self._body[: line_end + 2 + size + 2]
            if not size:
                return self._end_of_body()
            self._take_chunk(chunk)

    def _take_chunk(self, chunk: bytes) -> None:
        """Count the events in a chunk; an event may begin in one chunk and end in the next one."""
        if self._head.status != 200:
            self._tail = (self._tail + chunk)[:MAX_ERROR_BYTE_SIZE]
            return
        text = self._tail + chunk
        events, _, self._tail = text.rpartition(b"\n\n")
        if events:
            self.responses += events.count(_EVENT)
            if _ERROR_EVENT in events:
                self._event_error = events[events.index(_ERROR_EVENT) + len(_EVENT) :][:MAX_ERROR_BYTE_SIZE]

    def _end_of_body(self) -> int:
        self._in_body = False
        self.usable = self._head.keeps_alive
        if self._head.status == 200:
            if self._event_error:
                self.error = _error_text(self._event_error.partition(b"\n")[0])
                return FAILED
            self.responses = max(self.responses, 1)
            return DONE
        body = bytes(self._body) or self._tail
        text = _error_text(body)
        self.error = f"{self._head.status}: {text}" if text else f"status {self._head.status}"
        return FAILED


def read_head(block: bytes) -> ResponseHead:
    """Return what counts of a response's head, without the empty line at its end. Raises `UnreadableResponse`."""
    lines = block.split(b"\r\n")
    version, _, rest = lines[0].partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise UnreadableResponse(f"no response of HTTP/1.1: {lines[0][:40]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    keeps_alive = headers.get(b"connection", b"").lower() != b"close"
    if version == b"HTTP/1.0":
        keeps_alive = headers.get(b"connection", b"").lower() == b"keep-alive"
    if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
        return ResponseHead(int(rest[:3]), None, keeps_alive, in_chunks=True)
    length = headers.get(b"content-length")
    if length is None and rest[:3] not in _WITHOUT_BODY:
        return ResponseHead(int(rest[:3]), None, keeps_alive=False)
    length = length or b"0"
    if not length.isdigit():
        raise UnreadableResponse(f"a response with the length {length[:40]!r}")
    return ResponseHead(int(rest[:3]), int(length), keeps_alive)


def _error_text(body: bytes) -> str:
    """Return the text in the JSON of an error, else the body itself."""
    try:
        found = json.loads(body)
        text = found["error"] if isinstance(found, dict) and "error" in found else body.decode("utf-8", "replace")
    except ValueError:
        text = body.decode("utf-8", "replace")
    return str(text)[:MAX_ERROR_BYTE_SIZE].strip()
