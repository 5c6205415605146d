"""One budget of bytes for the shared memory of a server: admission is refused at the limit. Pure.

A block of an arena counts from when it is taken until its last lease is released, no matter who holds that lease.
Tensors of requests are admitted only within the limit. Outputs of workers are counted but never refused, because the
work for them is already done.
"""

from __future__ import annotations


class ByteBudget:
    """How many bytes are in use, and how many may be."""

    __slots__ = ("limit_byte_size", "used_byte_size")

    def __init__(self, limit_byte_size: int) -> None:
        assert limit_byte_size > 0, limit_byte_size
        self.limit_byte_size = limit_byte_size
        #: May exceed the limit, by outputs of workers.
        self.used_byte_size = 0

    def has_room(self, byte_size: int) -> bool:
        """Whether `byte_size` more bytes are within the limit."""
        return self.used_byte_size + byte_size <= self.limit_byte_size

    def add(self, byte_size: int) -> None:
        """`byte_size` more bytes are in use, within the limit or not."""
        self.used_byte_size += byte_size

    def remove(self, byte_size: int) -> None:
        """`byte_size` bytes are no longer in use."""
        self.used_byte_size -= byte_size
        assert self.used_byte_size >= 0, "more bytes were given back than taken"
