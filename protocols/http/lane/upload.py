"""The body of an inference request that comes in parts: one buffer, which grows with what has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.model import Model
    from protocols.http.lane.head import InferHead

#: The buffer has room for this many times of what has come, or for so many bytes. An announced size alone is no
#: reason to take memory, and growing by little would copy the body again and again.
_GROWTH = 8
_LEAST_BYTE_SIZE = 64 << 10


class Upload:
    """Collects `byte_size` bytes in `body`, for a request with the head `head` to `model`."""

    __slots__ = ("body", "byte_size", "head", "model", "received")

    def __init__(self, head: InferHead, model: Model, byte_size: int) -> None:
        self.head = head
        self.model = model
        self.byte_size = byte_size
        #: How many bytes have come; `body` may be larger until the last has.
        self.received = 0
        self.body = bytearray()

    def add(self, part: bytes) -> None:
        """Take the next bytes, never more than are missing."""
        end = self.received + len(part)
        if end > len(self.body):
            grown = bytearray(min(self.byte_size, max(end * _GROWTH, _LEAST_BYTE_SIZE)))
            grown[: self.received] = memoryview(self.body)[: self.received]
            self.body = grown
        self.body[self.received : end] = part
        self.received = end
