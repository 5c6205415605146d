"""One stream of a connection: a call with its headers, its messages and its answer so far."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from protocols.grpc.framing import MessageReader
from protocols.grpc.h2.flow_control import ReceiveWindow
from protocols.grpc.h2.limits import STREAM_WINDOW_BYTE_SIZE

if TYPE_CHECKING:
    from protocols.grpc.h2.flow_control import Output
    from protocols.grpc.h2.headers import RequestHead


class Event(enum.Enum):
    """What happened to a stream."""

    #: Its headers have come.
    OPENED = enum.auto()
    #: Messages, a fault in them, or the client's end have come.
    READABLE = enum.auto()
    #: A call has come whole, with its one message: as OPENED and READABLE.
    CALLED = enum.auto()
    #: All that was to be sent so far was sent.
    SENT = enum.auto()
    #: It ended before its answer: nothing can be sent any more.
    CLOSED = enum.auto()


class StreamCallbacks(Protocol):
    """What answers a stream. None of the methods may raise."""

    def readable(self) -> None: ...

    def sent(self) -> None: ...

    def closed(self) -> None: ...

    def cut_off(self) -> None:
        """End the call now: the server stops and its patience is over. The client is told so."""


class Stream(msgspec.Struct, eq=False):
    """A stream that is open in at least one direction; all state of it that is not the connection's."""

    number: int
    head: RequestHead
    #: What the client takes on it.
    send_window: int
    #: The only message of a call that came whole, until a reader is asked for.
    whole: bytes | None = None
    #: Bytes of DATA, without padding.
    received: int = 0
    #: Bytes, with padding, that the client has not got back for its windows.
    held: int = 0
    #: Whether the client has sent its last frame.
    remote_closed: bool = False
    #: Whether the connection still knows the stream.
    open: bool = True
    headers_sent: bool = False
    call: StreamCallbacks | None = None
    output: Output | None = None
    _reader: MessageReader | None = None
    _window: ReceiveWindow | None = None

    @property
    def reader(self) -> MessageReader:
        """Finds the messages; made when it is first needed, which small calls spare."""
        if self._reader is None:
            self._reader = MessageReader(self.head.encoding)
            if self.whole is not None:
                self._reader.messages.append(self.whole)
                self.whole = None
        return self._reader

    @property
    def window(self) -> ReceiveWindow:
        """What the client may send; made when it is first needed, which small calls spare."""
        if self._window is None:
            self._window = ReceiveWindow(STREAM_WINDOW_BYTE_SIZE)
        return self._window

    def ended_early(self) -> bool:
        """Whether the client announced another length by content-length than it sent."""
        announced = self.head.content_length
        return announced is not None and announced != self.received
