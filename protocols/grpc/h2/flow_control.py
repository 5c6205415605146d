"""Flow control of HTTP/2 in both directions (RFC 9113, 5.2). Pure.

A `ReceiveWindow` is what the client may send: it opens again as its bytes are used. `PeerLimits` are what the client
accepts on the connection, and `PendingData` is what a stream cannot send before the client's windows open.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocols.grpc.h2.headers import Trailers
    from protocols.grpc.h2.streams import Stream
    from shm.tensor import Buffer


class ReceiveWindow:
    """How many bytes the client may send, on a stream or on the connection.

    The client learns in portions of a quarter of the window that it is open again, not frame by frame.
    """

    __slots__ = ("_left", "_portion", "_used")

    def __init__(self, byte_size: int) -> None:
        self._left = byte_size
        self._used = 0
        self._portion = byte_size // 4

    def has_room(self, byte_size: int) -> bool:
        """Whether the client may send `byte_size` bytes."""
        return byte_size <= self._left

    def take(self, byte_size: int) -> bool:
        """Count `byte_size` bytes that the client has sent; returns whether it was allowed to."""
        if byte_size > self._left:
            return False
        self._left -= byte_size
        return True

    def give_back(self, byte_size: int) -> int:
        """Count `byte_size` bytes that were used; returns the increment for a WINDOW_UPDATE, 0 for none now."""
        self._used += byte_size
        if self._used < self._portion:
            return 0
        increment, self._used = self._used, 0
        self._left += increment
        return increment


class PeerLimits:
    """What the client accepts, changed by its SETTINGS and by its WINDOW_UPDATE of the connection."""

    __slots__ = ("initial_send_window", "max_frame_byte_size", "send_window")

    def __init__(self) -> None:
        #: What may be sent on all streams together.
        self.send_window = frames.DEFAULT_WINDOW_BYTE_SIZE
        #: What may be sent on a new stream. The window of an open stream is its own, `Stream.send_window`.
        self.initial_send_window = frames.DEFAULT_WINDOW_BYTE_SIZE
        self.max_frame_byte_size = frames.DEFAULT_MAX_FRAME_BYTE_SIZE

    def open_send_window(self, increment: int) -> None:
        """Apply a WINDOW_UPDATE of the connection. Raises `ConnectionFailure`."""
        if not increment:
            raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        self.send_window += increment
        if self.send_window > frames.MAX_WINDOW:
            raise ConnectionFailure(H2ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")

    def apply_settings(self, payload: memoryview, streams: Iterable[Stream]) -> None:
        """Apply the client's SETTINGS, also to its open `streams`. Raises `ConnectionFailure`."""
        for setting, value in frames.settings_entries(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                self._set_initial_window(value, streams)
            elif setting == Setting.MAX_FRAME_SIZE:
                if not frames.DEFAULT_MAX_FRAME_BYTE_SIZE <= value <= frames.LARGEST_MAX_FRAME_BYTE_SIZE:
                    raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
                self.max_frame_byte_size = min(value, limits.MAX_FRAME_BYTE_SIZE)
            elif setting == Setting.ENABLE_PUSH and value > 1:
                raise ConnectionFailure(H2ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")

    def _set_initial_window(self, byte_size: int, streams: Iterable[Stream]) -> None:
        if byte_size > frames.MAX_WINDOW:
            raise ConnectionFailure(H2ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {byte_size}")
        change = byte_size - self.initial_send_window
        self.initial_send_window = byte_size
        for stream in streams:
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                raise ConnectionFailure(H2ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is too large")


class PendingData:
    """What a stream has still to send: bytes, and perhaps its trailers behind them.

    The bytes are not copied. `release` is called when they are dropped, unless `take_release` has returned it.
    """

    __slots__ = ("_parts", "_release", "byte_size", "is_waiting", "stalled_ns", "trailers")

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()
        self._release: Callable[[], None] | None = None
        self.byte_size = 0
        #: Whether something was added that has not been sent.
        self.is_waiting = False
        self.trailers: Trailers | None = None
        #: When it was first seen to make no progress.
        self.stalled_ns: int | None = None

    def add(self, parts: Iterable[Buffer], release: Callable[[], None] | None = None) -> None:
        """Add `parts`, the memory of which `release` gives back; what was added before must have been sent."""
        self.is_waiting = True
        for part in parts:
            view = memoryview(part)
            self._parts.append(view)
            self.byte_size += len(view)
        self._release = release

    def take(self, byte_size: int) -> list[memoryview]:
        """Return the next `byte_size` bytes; there must be at least as many."""
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
        """Return what to call when nothing that was taken is used any more."""
        release, self._release = self._release, None
        return release

    def close(self) -> None:
        """Drop what is left. More calls do nothing."""
        self.is_waiting = False
        self._parts.clear()
        self.byte_size = 0
        if self._release is not None:
            release, self._release = self._release, None
            release()
