"""The streams of one connection; each is a call, with its request and its response so far. Pure.

Above them stands the flow control in both directions (RFC 9113, 5.2). A `ReceiveWindow` is what the client may send: it
opens again as its bytes are used. `PeerLimits` are what the client accepts on the connection, and `PendingData` is what
a stream cannot send before the client's windows open.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from protocols.grpc.framing import MessageReader
from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode, Setting
from protocols.grpc.h2.limits import STREAM_WINDOW_BYTE_SIZE
from protocols.grpc.h2.states import StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocols.grpc.framing import MessageMemory
    from protocols.grpc.h2.headers import RequestHead, Trailers
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


# A name of this module is found faster than a member of an enum (states.py).
_CLOSED = StreamState.CLOSED

#: How many streams that were reset are remembered: the client may send frames before it learns of the reset.
_REMEMBERED_RESETS = 128

#: About how many bytes a stream takes with its call, without the headers.
STREAM_BYTE_SIZE = 2048

#: Streams of usual clients take less, with their headers.
_USUAL_BYTE_SIZE = 8 << 10


class StreamEvent(enum.Enum):
    """What happened to a stream."""

    #: Its request head has arrived.
    OPENED = enum.auto()
    #: Messages, a fault in them, or the end of the request have arrived.
    READABLE = enum.auto()
    #: A complete call with one message has arrived: OPENED and READABLE in one.
    COMPLETE = enum.auto()
    #: All data that was given to be sent has left.
    DATA_SENT = enum.auto()
    #: The stream was closed before its response had ended: nothing can be sent any more.
    CLOSED = enum.auto()


class StreamCallbacks(Protocol):
    """What responds to a stream. None of the methods may raise."""

    def complete(self, message: bytes | None) -> None:
        """The only message of the call has arrived, with the end of the request; None if the reader has it."""

    def readable(self) -> None: ...

    def data_sent(self) -> None: ...

    def closed(self) -> None: ...

    def terminate(self) -> None:
        """End the call now, with a status: the server stops, and has waited for the call as long as it can."""


class Stream(msgspec.Struct, eq=False):
    """One stream. What all streams share is the connection's: its own windows, the order of frames."""

    id: int
    request_head: RequestHead
    #: How many bytes the client accepts on it.
    send_window: int
    #: OPEN, HALF_CLOSED_REMOTE or CLOSED; that a closed stream was RESET only `Streams` knows.
    state: StreamState = StreamState.OPEN
    #: The only message of a call that arrived complete, until `message_reader` is asked for.
    complete_message: bytes | None = None
    #: Bytes of DATA, without padding.
    received_byte_size: int = 0
    #: Bytes of DATA, with padding, that were received and not given back to the client's windows.
    held_byte_size: int = 0
    #: Whether the client has sent all of its request. Other than the state it is kept when the stream is closed.
    request_ended: bool = False
    headers_sent: bool = False
    #: What responds to it; None before, and after the response.
    call: StreamCallbacks | None = None
    #: None as long as everything could be sent at once.
    pending: PendingData | None = None
    #: Where messages count that wait for the call; None for a complete one, which is taken at once.
    memory: MessageMemory | None = None
    #: How many bytes of the stream itself count there until it is closed.
    counted_byte_size: int = 0
    _message_reader: MessageReader | None = None
    _receive_window: ReceiveWindow | None = None

    def read_by(self, make_reader: Callable[[MessageReader], MessageReader]) -> None:
        """Have another reader go on where the one of the stream has come to."""
        self._message_reader = make_reader(self.message_reader)

    @property
    def is_open(self) -> bool:
        """Whether anything can be sent on it."""
        return self.state is not _CLOSED

    @property
    def message_reader(self) -> MessageReader:
        """Finds the messages in DATA; made when it is first needed, which small calls do without."""
        if self._message_reader is None:
            self._message_reader = MessageReader(self.request_head.encoding, self.memory)
            if self.complete_message is not None:
                self._message_reader.messages.append(self.complete_message)
                self.complete_message = None
        return self._message_reader

    def count(self, *, few: bool = False) -> bool:
        """Count what the stream takes beside messages, until it is closed; returns whether there is memory for it.

        For streams whose request does not come complete with its headers: thousands can be opened with few bytes. There
        is always memory for one of `few` streams whose headers are not large.
        """
        if self.memory is not None:
            budget, byte_size = self.memory.budget, STREAM_BYTE_SIZE + self.request_head.byte_size
            if not (budget.has_room(byte_size) or (few and byte_size <= _USUAL_BYTE_SIZE)):
                return False
            self.counted_byte_size = byte_size
            budget.add(byte_size)
        return True

    def forget_messages(self) -> None:
        """The stream is closed: neither it nor messages that wait for its call count any longer."""
        if self.counted_byte_size:
            assert self.memory is not None, "it has counted there"
            self.memory.budget.remove(self.counted_byte_size)
            self.counted_byte_size = 0
        if self._message_reader is not None:
            self._message_reader.close()

    @property
    def receive_window(self) -> ReceiveWindow:
        """How many bytes the client may send; made when it is first needed, which small calls do without."""
        if self._receive_window is None:
            self._receive_window = ReceiveWindow(STREAM_WINDOW_BYTE_SIZE)
        return self._receive_window

    def has_other_length_than_announced(self) -> bool:
        """Whether content-length, if there is one, differs from the number of bytes received."""
        announced = self.request_head.content_length
        return announced is not None and announced != self.received_byte_size


class Streams:
    """All streams of a connection and what happened to them: the two halves of the connection share it."""

    __slots__ = ("_recently_reset", "by_id", "events", "last_id", "memory")

    def __init__(self, memory: MessageMemory | None = None) -> None:
        #: Where messages that wait count; None for nowhere.
        self.memory = memory
        #: The streams that are not closed, in the order of their ids.
        self.by_id: dict[int, Stream] = {}
        #: The highest id of a request.
        self.last_id = 0
        #: What happened, in order; the transport handles the events and clears the list.
        self.events: list[tuple[StreamEvent, Stream]] = []
        self._recently_reset: deque[int] = deque(maxlen=_REMEMBERED_RESETS)

    def state_of(self, stream_id: int) -> StreamState:
        stream = self.by_id.get(stream_id)
        if stream is not None:
            return stream.state
        if stream_id > self.last_id:
            return StreamState.IDLE
        return StreamState.RESET if stream_id in self._recently_reset else StreamState.CLOSED

    def note_reset(self, stream_id: int) -> None:
        """The server has sent RST_STREAM for a stream, which need not have been opened."""
        self._recently_reset.append(stream_id)
