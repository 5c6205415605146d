"""The body of an inference request that comes in parts: in memory of its model, or in a buffer that grows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.model import Model
    from protocols.http.fast.connection import FastConnection
    from protocols.http.fast.request_head import InferHead

#: The buffer has room for this many times of what has come, or for so many bytes. An announced size alone is no
#: reason to take memory, and growing by little would copy the body again and again.
_GROWTH = 8
_LEAST_BYTE_SIZE = 64 << 10


class Upload(msgspec.Struct, eq=False):
    """Collects `byte_size` bytes, for a request with the head `head` to `model`."""

    head: InferHead
    model: Model
    byte_size: int
    #: Memory of the model, with room for all of the body. It stays the caller's.
    place: ReceiveBuffer | None = None
    #: How many bytes have come; the buffer may be larger until the last has.
    received: int = 0
    _buffer: bytearray = msgspec.field(default_factory=bytearray)

    @property
    def body(self) -> bytearray | memoryview:
        """What has come, once all of it has."""
        return self._buffer if self.place is None else self.place.view

    def room(self) -> memoryview:
        """Return where in `place` the next bytes may be received to, which `received` then counts."""
        assert self.place is not None, "the body has no place of its own"
        return self.place.view[self.received :]

    def add(self, part: bytes) -> None:
        """Take the next bytes, never more than are missing."""
        end = self.received + len(part)
        if self.place is not None:
            self.place.view[self.received : end] = part
        else:
            self._grow(end)
            self._buffer[self.received : end] = part
        self.received = end

    def _grow(self, end: int) -> None:
        if end > len(self._buffer):
            grown = bytearray(min(self.byte_size, max(end * _GROWTH, _LEAST_BYTE_SIZE)))
            grown[: self.received] = memoryview(self._buffer)[: self.received]
            self._buffer = grown


class PlaceReceiver(asyncio.BufferedProtocol):
    """Stands before `connection` until all of `upload` is there: what comes is received in its place, without a copy.

    It does so for nothing else: small requests would pay for being asked where to receive them.
    """

    def __init__(self, connection: FastConnection, upload: Upload) -> None:
        """`upload` has a place, and lacks something."""
        self._connection = connection
        self._upload = upload

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._upload.room()

    def buffer_updated(self, byte_size: int) -> None:
        self._connection.placed(self._upload, byte_size)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
