"""The body of an inference request that comes in parts: in memory of its model, or in a buffer that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.bodies import Body
    from kernel.model import Model
    from protocols.http.lane.head import InferHead

#: The buffer has room for this many times of what has come, or for so many bytes. An announced size alone is no
#: reason to take memory, and growing by little would copy the body again and again.
_GROWTH = 8
_LEAST_BYTE_SIZE = 64 << 10


class Upload:
    """Collects `byte_size` bytes in `body`, for a request with the head `head` to `model`."""

    __slots__ = ("_buffer", "byte_size", "head", "model", "place", "received")

    def __init__(self, head: InferHead, model: Model, byte_size: int, place: Body | None) -> None:
        """`place` is memory of the model, with room for all of the body, and stays the caller's."""
        self.head = head
        self.model = model
        self.byte_size = byte_size
        self.place = place
        #: How many bytes have come; the buffer may be larger until the last has.
        self.received = 0
        self._buffer = bytearray()

    @property
    def body(self) -> bytearray | memoryview:
        """What has come, once all of it has."""
        return self._buffer if self.place is None else self.place.view

    def room(self) -> memoryview | None:
        """Return where the next bytes may be received to, which `received` then counts; None for nowhere."""
        return None if self.place is None else self.place.view[self.received :]

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
