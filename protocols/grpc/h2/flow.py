"""Flow control of HTTP/2 in both directions (RFC 9113, 5.2). Pure.

What the peer may send is a window that is opened again as its bytes are used; what the server may not
send yet waits in an `Output`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shm.tensor import Buffer


class ReceiveWindow:
    """How many bytes the peer may send. It is told of more in portions, not frame by frame."""

    __slots__ = ("_left", "_portion", "_used")

    def __init__(self, byte_size: int) -> None:
        self._left = byte_size
        self._used = 0
        self._portion = byte_size // 4

    def has(self, byte_size: int) -> bool:
        """Whether the peer may send so many bytes."""
        return byte_size <= self._left

    def take(self, byte_size: int) -> bool:
        """The peer has sent so many bytes; returns whether it was allowed to."""
        if byte_size > self._left:
            return False
        self._left -= byte_size
        return True

    def give(self, byte_size: int) -> int:
        """So many of them were used; returns by how much the peer is to be told that the window opens, or 0."""
        self._used += byte_size
        if self._used < self._portion:
            return 0
        increment, self._used = self._used, 0
        self._left += increment
        return increment


class Output:
    """What a stream has still to send: bytes, and behind them perhaps its trailers.

    The bytes are not copied. Who takes the last of them takes over `release` as well; otherwise it is
    called when they are dropped.
    """

    __slots__ = ("_parts", "_release", "byte_size", "stalled_ns", "trailers", "waiting")

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()
        self._release: Callable[[], None] | None = None
        self.byte_size = 0
        #: Whether something was added that has not left.
        self.waiting = False
        self.trailers: bytes | None = None
        #: Since when it was seen to make no progress.
        self.stalled_ns: int | None = None

    def add(self, parts: Iterable[Buffer], release: Callable[[], None] | None = None) -> None:
        self.waiting = True
        for part in parts:
            view = memoryview(part)
            self._parts.append(view)
            self.byte_size += len(view)
        self._release = release

    def take(self, byte_size: int) -> list[memoryview]:
        """Return the next `byte_size` bytes, which must be there."""
        self.byte_size -= byte_size
        self.stalled_ns = None
        taken: list[memoryview] = []
        while byte_size:
            part = self._parts.popleft()
            if len(part) > byte_size:
                self._parts.appendleft(part[byte_size:])
                part = part[:byte_size]
            byte_size -= len(part)
            taken.append(part)
        return taken

    def take_release(self) -> Callable[[], None] | None:
        """Return what is to be called when all that was taken is of no use any more."""
        release, self._release = self._release, None
        return release

    def close(self) -> None:
        """Drop what is left. More calls do nothing."""
        self.waiting = False
        self._parts.clear()
        self.byte_size = 0
        if self._release is not None:
            release, self._release = self._release, None
            release()
