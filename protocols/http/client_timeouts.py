"""How long a client may keep a connection of aiohttp waiting, and how it may cut its body into chunks. Pure.

aiohttp closes connections that are idle. It waits for ever for the rest of a head, for a client that does not
read its answer, and reads chunk extensions of any length.
"""

from __future__ import annotations

#: For the rest of a head, and without reading anything of an answer.
HEAD_S = 10.0
SEND_S = 60.0

#: Chunks that are not empty which a body may have: every one costs time, however small it is (Triton).
MAX_CHUNKS = 65536

#: What may stand around the data of a chunk: extensions of 256 bytes, its size, line ends.
_CHUNK_OVERHEAD = 256 + 24
#: What a body may have besides: trailers, and white space of its head that was not counted as such.
_BODY_OVERHEAD = 16 << 10


class Patience:
    """Watches one connection; asked now and then whether it is over. Times are seconds of a clock."""

    __slots__ = ("_head_since", "_stalled_since", "_unsent")

    def __init__(self) -> None:
        self._head_since: float | None = None
        self._stalled_since: float | None = None
        self._unsent = 0

    def received(self, now: float, *, idle: bool) -> None:
        """Bytes have come; `idle` where they are of no request that is known: a head has begun."""
        if not idle:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = now

    def is_over(self, now: float, *, idle: bool, unsent: int) -> bool:
        """Whether the client has been slow for too long. `unsent` is how many bytes it has to read."""
        if not idle:
            self._head_since = None
        if not unsent or unsent < self._unsent:
            self._stalled_since = now if unsent else None
        elif self._stalled_since is None:
            self._stalled_since = now
        self._unsent = unsent
        return any(
            since is not None and now - since >= limit_s
            for since, limit_s in ((self._head_since, HEAD_S), (self._stalled_since, SEND_S))
        )


class ChunkOverhead:
    """Compares what a chunked body takes on the wire with the data in it."""

    __slots__ = ("_wire_byte_size",)

    def __init__(self) -> None:
        self._wire_byte_size = 0

    def is_excessive(self, wire_byte_size: int, data_byte_size: int, max_chunks: int) -> bool:
        """Whether so much framing cannot be. `wire_byte_size` more bytes have come, and `data_byte_size`
        bytes of data altogether, in `max_chunks` chunks at most."""
        self._wire_byte_size += wire_byte_size
        chunks = min(data_byte_size + 1, max_chunks)
        return self._wire_byte_size - data_byte_size > _BODY_OVERHEAD + chunks * _CHUNK_OVERHEAD
