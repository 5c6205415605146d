"""What a client may cost: how long it keeps a connection waiting, how it cuts its body into chunks, whether it is gone.

aiohttp closes connections that are idle. It waits without limit for the rest of a head and for a client that does not
read its response, and reads chunk extensions of any length: those limits are here, and are decided without I/O.

An event loop notices the end of a connection when it reads from it. Where it does not read, because the client has sent
more than the server takes at once, requests of a client that has gone would still be executed: `abort_gone` finds it.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

#: How many chunks that are not empty a body may have: each one costs time, however small it is (Triton).
MAX_CHUNKS = 65536

#: What may stand around the data of a chunk: extensions of 256 bytes, its size, line ends.
_CHUNK_OVERHEAD = 256 + 24

#: What a body may have besides: trailers, and white space of its head that was not counted as such.
_BODY_OVERHEAD = 16 << 10


class ClientTimeouts(msgspec.Struct, frozen=True):
    """How long clients may keep a connection waiting, in seconds."""

    #: Without any request.
    idle_s: float = 75.0
    #: For the rest of a request head.
    head_s: float = 10.0
    #: Without any byte of a request body; after this time a body must have come at `bytes_per_s` on average.
    body_s: float = 30.0
    bytes_per_s: int = 1024
    #: For the rest of a body that is not used; then the connection is closed.
    unwanted_body_s: float = 10.0
    #: Without reading anything of a response.
    send_s: float = 60.0

    def body_end_s(self, begin_s: float, received_byte_size: int) -> float:
        """Return when a body that began at `begin_s` has come too slowly."""
        return begin_s + self.body_s + received_byte_size / self.bytes_per_s


TIMEOUTS = ClientTimeouts()


class UnreadResponse:
    """Watches whether a client reads what it is sent. Times are seconds of a clock."""

    __slots__ = ("_since_s", "_unsent")

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._unsent = 0

    def waited_s(self, now_s: float, unsent: int) -> float:
        """Return for how long the client has read nothing; `unsent` is how many bytes it has to read."""
        if not unsent:
            self._since_s = None
        elif self._since_s is None or unsent < self._unsent:
            self._since_s = now_s
        self._unsent = unsent
        return 0.0 if self._since_s is None else now_s - self._since_s


class SlowClient:
    """Watches a connection that aiohttp serves; asked now and then whether its client was too slow."""

    __slots__ = ("_head_since_s", "_unread")

    def __init__(self) -> None:
        self._head_since_s: float | None = None
        self._unread = UnreadResponse()

    @property
    def head_begun(self) -> bool:
        """Whether a request head has begun and not ended, as far as is known."""
        return self._head_since_s is not None

    def received(self, now_s: float, *, idle: bool) -> None:
        """Bytes have come; `idle` where they are of no request that is known: a head has begun."""
        if not idle:
            self._head_since_s = None
        elif self._head_since_s is None:
            self._head_since_s = now_s

    def is_too_slow(self, now_s: float, *, idle: bool, unsent: int) -> bool:
        """Whether the client has kept the connection waiting for too long; `unsent` as for `UnreadResponse`."""
        if not idle:
            self._head_since_s = None
        if self._unread.waited_s(now_s, unsent) >= TIMEOUTS.send_s:
            return True
        return self._head_since_s is not None and now_s - self._head_since_s >= TIMEOUTS.head_s


class ChunkOverhead:
    """Compares what a chunked body takes on the wire with the data in it."""

    __slots__ = ("_wire_byte_size",)

    def __init__(self) -> None:
        self._wire_byte_size = 0

    def is_excessive(self, wire_byte_size: int, data_byte_size: int, max_chunks: int) -> bool:
        """Whether there is more framing than honest clients send.

        `wire_byte_size` more bytes have come, and `data_byte_size` bytes of data altogether, in `max_chunks`
        chunks at most.
        """
        self._wire_byte_size += wire_byte_size
        chunks = min(data_byte_size + 1, max_chunks)
        return self._wire_byte_size - data_byte_size > _BODY_OVERHEAD + chunks * _CHUNK_OVERHEAD


def abort_gone(transports: Iterable[asyncio.Transport]) -> None:
    """Abort each transport whose client has gone, or sends no more: a connection that is read ends then, too.

    One system call for all of them, which takes less than 1 µs for each.
    """
    found = {}
    poll = select.poll()
    for transport in transports:
        sock = transport.get_extra_info("socket")
        if sock is not None and (fd := sock.fileno()) >= 0:
            found[fd] = transport
            poll.register(fd, select.POLLRDHUP)  # and, as always, POLLHUP and POLLERR
    for fd, _ in poll.poll(0) if found else ():
        found[fd].abort()
