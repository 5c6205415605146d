"""`LoadedConnection`: a socket of a load process, and the request that is in flight on it."""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

#: What one call receives, and from how many bytes on a body is received into memory that is used again.
_RECEIVE_BYTE_SIZE = 1 << 16
_SCRATCH = bytearray(1 << 20)

#: Seconds until a connection must be there.
_CONNECT_TIMEOUT_S = 10.0

READ, WRITE = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


class LoadState(Protocol):
    """What a protocol knows of a connection: `protocols/clients/` has one for each."""

    pending: bytes
    left: int
    responses: int
    error: str
    usable: bool

    def begin(self, request: bytes) -> bytes: ...

    def more(self) -> bytes: ...

    def skip(self, byte_size: int) -> int: ...

    def feed(self, data: bytes) -> int: ...

    def closed(self) -> int: ...


class LoadedConnection:
    """At most one request is in flight. The owner registers it with an epoll object, which must outlive it."""

    __slots__ = (
        "_connect", "_epoll", "_out", "_request_number", "_requests", "begin_ns", "due_ns", "fd", "first_ns",
        "in_flight", "sequence", "socket", "state", "step",
    )  # fmt: skip

    def __init__(
        self,
        epoll: select.epoll,
        connect: Callable[[], tuple[socket.socket, LoadState]],
        requests: list[list[bytes]],
    ) -> None:
        self._epoll = epoll
        self._connect = connect
        self._requests = requests
        self._request_number = 0
        self._out = memoryview(b"")
        #: When the request was sent, when it was due, and when its first response came; nanoseconds.
        self.begin_ns = self.due_ns = self.first_ns = 0
        self.in_flight = False
        #: The id of its sequence as it stands in a request, and how many requests of it were begun.
        self.sequence = b""
        self.step = 0
        self.fd = -1
        self.open()

    def open(self) -> None:
        """Connect. Raises `OSError`."""
        self.socket, self.state = self._connect()
        self.fd = self.socket.fileno()
        self._epoll.register(self.fd, READ)

    def close(self) -> None:
        """Close the socket."""
        if self.fd >= 0:
            self._epoll.unregister(self.fd)
            self.socket.close()
            self.fd = -1
        self._out = memoryview(b"")

    def next_request(self) -> bytes:
        """Return the next request that belongs to no sequence."""
        requests = self._requests
        if len(requests) == 1:
            return requests[0][0]
        self._request_number = (self._request_number + 1) % len(requests)
        return requests[self._request_number][0]

    def next_of_sequence(self, *, last: bool) -> bytes:
        """Return the next request of the sequence. Each step of a sequence has the same inputs in all of them."""
        number = self.step * 4 % len(self._requests)
        before, behind = self._requests[number + (not self.step) + 2 * last]
        self.step = 0 if last else self.step + 1
        return before + self.sequence + behind

    def send(self, request: bytes) -> None:
        """Begin a request. Raises `OSError`."""
        state = self.state
        data = state.begin(request)
        if state.pending:
            data = state.pending + data
            state.pending = b""
        self.in_flight = True
        self.first_ns = 0
        self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        if self._out:
            self._out = memoryview(bytes(self._out) + data)
            return
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._out = memoryview(data)[sent:]
            self._epoll.modify(self.fd, WRITE)

    def writable(self) -> None:
        """Send what could not be sent before. Raises `OSError`."""
        out, self._out = self._out, memoryview(b"")
        if out:
            self._write(out)
        if not self._out:
            self._epoll.modify(self.fd, READ)

    def receive(self) -> int:
        """Receive once. Returns the outcome of the request in flight. Raises `OSError`."""
        state = self.state
        if state.left >= _RECEIVE_BYTE_SIZE:
            received = self.socket.recv_into(_SCRATCH, min(state.left, len(_SCRATCH)))
            return state.skip(received) if received else state.closed()
        try:
            data = self.socket.recv(_RECEIVE_BYTE_SIZE)
        except BlockingIOError:
            return 0  # the event was one of before
        if not data:
            return state.closed()
        outcome = state.feed(data)
        if state.pending or (not outcome and self.in_flight):
            self._send_more(state)
        return outcome

    def _send_more(self, state: LoadState) -> None:
        """Send acknowledgements, and what the server's windows allow now."""
        data = state.pending + state.more()
        state.pending = b""
        if data:
            self._write(data)


def open_socket(host: str, port: int) -> socket.socket:
    """Return a connected socket that does not block. Raises `OSError`."""
    found = socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.setblocking(False)
    return found


def reason(error: OSError) -> str:
    """Return why a connection failed, without addresses."""
    if error.errno == errno.EMFILE:
        return "this program may not open more files (ulimit -n)"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error) or type(error).__name__
