"""Lines of the log that wait to be written, limited in number and in bytes. Pure.

When the queue is full, further lines are dropped. The queue remembers how many were dropped, and between which lines.
"""

from __future__ import annotations

from collections import deque

#: The most lines and bytes that wait. One line may exceed the limit of the bytes.
MAX_LINES = 16384
MAX_BYTE_SIZE = 8 << 20

#: How many bytes are taken at a time: what a pipe holds.
PORTION_BYTE_SIZE = 64 << 10

#: A line with its end, or the number of lines that were dropped at its place.
QueuedLine = bytes | int


class LineQueue:
    """Lines in their order. It has no lock: the owner calls one method at a time."""

    def __init__(self, max_lines: int = MAX_LINES, max_byte_size: int = MAX_BYTE_SIZE) -> None:
        self._max_lines = max_lines
        self._max_byte_size = max_byte_size
        self._items: deque[QueuedLine] = deque()
        self._line_count = 0
        self._byte_size = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def full(self) -> bool:
        """Whether the next line is to be dropped."""
        return self._line_count >= self._max_lines or self._byte_size >= self._max_byte_size

    def put(self, line: bytes) -> None:
        """Add a line. The queue must not be full."""
        self._items.append(line)
        self._line_count += 1
        self._byte_size += len(line)

    def drop(self) -> None:
        """Count a line that is dropped."""
        if self._items and isinstance(self._items[-1], int):
            self._items[-1] += 1
        else:
            self._items.append(1)

    def take(self) -> list[QueuedLine]:
        """Remove and return the oldest lines, together about `PORTION_BYTE_SIZE` bytes."""
        taken: list[QueuedLine] = []
        byte_size = 0
        while self._items and byte_size < PORTION_BYTE_SIZE:
            item = self._items.popleft()
            taken.append(item)
            if isinstance(item, bytes):
                byte_size += len(item)
                self._line_count -= 1
        self._byte_size -= byte_size
        return taken
