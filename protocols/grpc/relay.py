"""Calls that a front door in a process of its own passes on to the kernel's process, which responds to them.

Beside a client's connection that needs it stands another one from the door to the kernel, of HTTP/2 as well. So such a
call has the headers, the deadline, the end and the flow control that its client gives it, and the kernel serves it as
any other: with its limits, and as a call of this client. Nothing of it is decoded here. What a door has received of a
call and not passed on is bounded by the windows of both connections, and counts in its memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from grpclib.const import Status
from h2.config import H2Configuration
from h2.connection import H2Connection as ClientHalf
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from protocols.access import Peer
from protocols.grpc.framing import (
    MESSAGE_START_BYTE_SIZE,
    PREFIX,
    CompressedMessage,
    MessageFault,
    MessageReader,
    RawPart,
    RefusedMessage,
)
from protocols.grpc.h2.frames import DEFAULT_WINDOW_BYTE_SIZE, H2ErrorCode
from protocols.grpc.h2.headers import encode_block, encode_trailers, status_trailers
from protocols.grpc.h2.transport import ServerConnection
from protocols.grpc.handlers import CALL_TERMINATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocols.grpc.framing import ReceivedMessage
    from protocols.grpc.h2.headers import Fields, Trailers
    from protocols.grpc.h2.streams import Stream
    from shm.blocks import ByteBudget
    from shm.tensor import Buffer

logger = logging.getLogger(__name__)

#: What the kernel may send before the client has taken it, of one call and of all calls of a client.
_STREAM_WINDOW_BYTE_SIZE = 256 << 10
_CONNECTION_WINDOW_BYTE_SIZE = 4 << 20

_MAX_FRAME_BYTE_SIZE = 256 << 10

#: While the kernel has as much to read of a client's calls, no more of their messages is sent to it.
_BACKLOG_BYTE_SIZE = 256 << 10

#: Fields that a response cannot have twice: they are left out of trailers behind headers.
_OF_HEADERS = frozenset({":status", "content-type"})

#: The status of calls whose connection to the kernel is lost, or could not be made.
LOST = "the call was lost between two processes of the server"


def raw_message(message: ReceivedMessage) -> RawPart:
    """Return the bytes of a message as they come in a call. A refused one, whose bytes are lost, has none."""
    if isinstance(message, (RawPart, RefusedMessage)):
        return message if isinstance(message, RawPart) else RawPart()
    content = message.content if isinstance(message, CompressedMessage) else message
    return RawPart(b"".join((PREFIX.pack(isinstance(message, CompressedMessage), len(content)), content)))


class PassingReader(MessageReader):
    """As `MessageReader`; from some byte on it finds no messages, but keeps what comes as `RawPart`."""

    __slots__ = ("_passes", "elsewhere", "on_raw")

    def __init__(self, reader: MessageReader) -> None:
        """Go on where `reader`, which is not used any more, has come to."""
        super().__init__("identity")
        self.continue_from(reader)
        self._passes = False
        #: Asked for a large message, with its first bytes (none for a compressed one) and its length: whether it and
        #: all that follows is kept raw.
        self.elsewhere: Callable[[bytes, int], bool] | None = None
        #: Called when raw bytes were added.
        self.on_raw: Callable[[], None] | None = None

    @property
    def between_messages(self) -> bool:
        return not self._passes and super().between_messages

    def pass_on(self) -> None:
        """Keep all that was not taken raw, and all that comes."""
        for _ in range(len(self.messages)):
            message = self.take()
            if isinstance(message, RefusedMessage):
                self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, message.error.text)
            self.add(raw_message(message))
        self._pass_rest()

    def feed(self, data: memoryview) -> None:
        if self._passes:
            self._add_raw(data)
        else:
            super().feed(data)

    def end(self) -> None:
        if not self._passes:
            super().end()

    def direct_buffer(self) -> memoryview | None:
        if not self._passes and self._goes_elsewhere(directly=True):
            self._pass_rest()
            self._count_gathered()
            self._notify()
        return None if self._passes else super().direct_buffer()

    def _take_content(self, data: memoryview) -> int:
        if self._goes_elsewhere(directly=False):
            self._pass_rest()
            self._add_raw(data)
            return len(data)
        return super()._take_content(data)

    def _goes_elsewhere(self, *, directly: bool) -> bool:
        if self.elsewhere is None or self._large is not None or self._refusal is not None:
            return False
        if not self._is_due(directly=directly):
            return False
        return self.elsewhere(
            b"" if self._compressed else bytes(self._gathered[:MESSAGE_START_BYTE_SIZE]), self._length
        )

    def _pass_rest(self) -> None:
        """Keep the message raw of which a part has come."""
        if self._passes:
            return
        self._passes = True
        if self._refusal is not None:
            self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, self._refusal.error.text)
        elif self._length >= 0:
            begun: Buffer = self._gathered if self._large is None else self._large[: self._filled]
            self.add(RawPart(b"".join((PREFIX.pack(self._compressed, self._length), begun))))
        elif self._gathered:
            self.add(RawPart(self._gathered))
        self._gathered.clear()
        self._large, self._length = None, -1
        self._count_gathered()

    def _add_raw(self, data: memoryview) -> None:
        if self.fault is not None:
            return
        if self.has_room(len(data)):
            self.add(RawPart(data))
        else:
            assert self._memory is not None, "without a budget there is room"
            self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, self._memory.full().text)
        self._notify()

    def _notify(self) -> None:
        if self.on_raw is not None:
            self.on_raw()


class Relay(asyncio.Protocol):
    """The connection to the kernel beside one of a client. Calls may begin before it is connected."""

    def __init__(self, budget: ByteBudget) -> None:
        """In `budget` counts what the kernel has sent, and the client has not taken."""
        self.budget = budget
        #: Whether no more calls may begin.
        self.ended = False
        self._calls: dict[int, RelayedCall] = {}
        self._transport: asyncio.Transport | None = None
        self._paused = True
        # What is sent and received is as it is: the client's side and the kernel's have checked it, or will.
        self._http2 = ClientHalf(
            H2Configuration(
                client_side=True, header_encoding="latin-1", validate_outbound_headers=False,
                normalize_outbound_headers=False, validate_inbound_headers=False, normalize_inbound_headers=False,
            )
        )  # fmt: skip
        self._http2.initiate_connection()
        self._http2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTE_SIZE,
                SettingCodes.MAX_FRAME_SIZE: _MAX_FRAME_BYTE_SIZE,
            }
        )
        self._http2.increment_flow_control_window(_CONNECTION_WINDOW_BYTE_SIZE - DEFAULT_WINDOW_BYTE_SIZE)

    # ---- for calls -----------------------------------------------------------------------------

    def begin(self, call: RelayedCall, fields: Fields) -> int:
        """Begin a call with these headers; returns its number, 0 where none can begin."""
        if self.ended:
            return 0
        try:
            number: int = self._http2.get_next_available_stream_id()
            self._http2.send_headers(
                number,
                # The length was checked, and differs where a message was inflated.
                [(n.encode("latin-1"), v.encode("latin-1")) for n, v in fields if n != "content-length"],
            )
        except ProtocolError:  # too many at a time, or all numbers were used
            return 0
        self._calls[number] = call
        self._flush()
        return number

    def send(self, number: int, data: memoryview) -> int:
        """Send the first bytes of `data`, as many as may be sent now; returns how many. The rest follows `resumed`."""
        if self._paused or number not in self._calls:
            return 0
        room = min(self._http2.local_flow_control_window(number), self._http2.max_outbound_frame_size, len(data))
        if room > 0:
            self._http2.send_data(number, bytes(data[:room]))
            self._flush()
        return max(0, room)

    def end(self, number: int) -> None:
        """The client has sent its last byte."""
        if number in self._calls:
            self._http2.end_stream(number)
            self._flush()

    def taken(self, number: int, byte_size: int) -> None:
        """The client has taken as much of a response, or nobody will."""
        if not self.ended:
            self._http2.acknowledge_received_data(byte_size, number)
            self._flush()

    def cancel(self, number: int) -> None:
        """The client has ended the call."""
        if self._calls.pop(number, None) is not None:
            self._http2.reset_stream(number, ErrorCodes.CANCEL)
            self._flush()

    def close(self) -> None:
        """The client has gone, and with it all calls."""
        self.ended = True
        if self._transport is not None:
            self._transport.abort()

    def lose(self) -> None:
        """End the calls that run: nobody responds to them."""
        self.ended = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.give_up(Status.UNAVAILABLE, LOST)

    def _flush(self) -> None:
        if self._transport is not None and (octets := self._http2.data_to_send()):
            self._transport.write(octets)

    # ---- asyncio.Protocol ------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(_BACKLOG_BYTE_SIZE)
        if self.ended:
            self._transport.abort()
            return
        self._flush()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._go_on()

    def data_received(self, data: bytes) -> None:
        try:
            events = self._http2.receive_data(data)
        except ProtocolError as error:
            logger.error("what the kernel has sent of passed on calls cannot be understood: %s", error)
            self.close()
            return
        opened = False
        for event in events:
            if isinstance(event, (WindowUpdated, RemoteSettingsChanged)):
                opened = True
            elif isinstance(event, ConnectionTerminated):
                self.close()
                return
            else:
                self._received(event)
        if opened:
            self._go_on()
        self._flush()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lose()

    def _go_on(self) -> None:
        for call in tuple(self._calls.values()):
            call.pump()

    def _received(self, event: object) -> None:
        number: int = getattr(event, "stream_id", 0)
        call = self._calls.get(number)
        if isinstance(event, DataReceived):
            if call is None:
                self.taken(number, event.flow_controlled_length)
            else:
                call.take_data(event.data, event.flow_controlled_length)
        elif call is None:
            return
        elif isinstance(event, ResponseReceived) and event.stream_ended is None:
            call.take_headers(cast("Fields", event.headers))
        elif isinstance(event, (ResponseReceived, TrailersReceived)):
            del self._calls[number]
            call.take_trailers(cast("Fields", event.headers))
        elif isinstance(event, StreamReset):
            del self._calls[number]
            call.take_reset(H2ErrorCode(event.error_code))


class RelayedCall:
    """A call that was passed on. A `protocols.grpc.h2.streams.StreamCallbacks`.

    The stream's reader is a `PassingReader` that passes on, or the call has come complete.
    """

    def __init__(self, relay: Relay, connection: ServerConnection, stream: Stream) -> None:
        self._relay = relay
        self._connection = connection
        self._stream = stream
        self._number = 0
        #: What goes before all that the reader has, and what gives its memory back.
        self._first: deque[Buffer] = deque()
        self._release: Callable[[], None] | None = None
        #: What was begun to be sent.
        self._part: memoryview | None = None
        self._sent_all = False
        #: What the kernel has sent and the client's stream does not have yet, and then what ends the response.
        self._waiting: list[bytes] = []
        self._trailers: Trailers | None = None
        #: Bytes of the response, with padding, that were not taken: those that are leaving, and all of them.
        self._leaving_byte_size = 0
        self._held_byte_size = 0

    def begin(
        self, fields: Fields, first: Iterable[Buffer] = (), release: Callable[[], None] | None = None
    ) -> RelayedCall:
        """Pass the call on. `release` is called when the bytes of `first`, which begin it, are not used any more."""
        self._first.extend(first)
        self._release = release
        self._number = self._relay.begin(self, fields)
        if not self._number:
            self.give_up(Status.UNAVAILABLE, LOST)
        else:
            self.pump()
        return self

    # ---- protocols.grpc.h2.streams.StreamCallbacks -------------------------------------------------------

    def complete(self, message: bytes | None) -> None:
        assert message is None, "the reader has it"
        self.pump()

    def readable(self) -> None:
        self.pump()

    def data_sent(self) -> None:
        left, self._leaving_byte_size = self._leaving_byte_size, 0
        self._taken(left)
        self._send()

    def closed(self) -> None:
        self._relay.cancel(self._number)
        self._forget()

    def terminate(self) -> None:
        self.give_up(Status.UNAVAILABLE, CALL_TERMINATED)

    def give_up(self, status: Status, text: str) -> None:
        """Respond in place of the kernel."""
        self._relay.cancel(self._number)
        self._forget()
        if self._stream.is_open:
            sending = self._connection.sending
            sending.drop_data(self._stream)
            sending.send_trailers(self._stream, status_trailers(status.value, text))
            self._connection.schedule_write()

    def _forget(self) -> None:
        self._waiting.clear()
        self._first.clear()
        self._part = None
        self._sent_all = True
        self._leaving_byte_size = 0
        self._taken(self._held_byte_size)
        release, self._release = self._release, None
        if release is not None:
            release()

    # ---- the request ---------------------------------------------------------------------------

    def pump(self) -> None:
        """Pass on what was received, as much as the kernel takes now."""
        stream = self._stream
        if self._sent_all or not self._number:
            return
        reader = stream.message_reader
        if reader.fault is not None:
            self.give_up(reader.fault.status, reader.fault.text)
            return
        took = False
        while True:
            if not self._part:
                if self._first:
                    self._part = memoryview(self._first.popleft())
                elif reader.messages:
                    self._part, took = memoryview(cast("bytes", reader.take())), True
                else:
                    break
            sent = self._relay.send(self._number, self._part)
            if not sent:
                break
            self._part = self._part[sent:]
        if took and stream.is_open:
            self._connection.sending.consumed(stream)
            self._connection.schedule_write()
        if self._part or self._first or reader.messages:
            return
        self._part = None
        if self._release is not None:
            release, self._release = self._release, None
            release()
        if stream.request_ended:
            self._sent_all = True
            self._relay.end(self._number)

    # ---- the response --------------------------------------------------------------------------

    def take_headers(self, fields: Fields) -> None:
        """The kernel has begun a response."""
        if self._stream.is_open and not self._stream.headers_sent:
            self._connection.sending.send_headers(self._stream, encode_block(fields))
            self._connection.schedule_write()

    def take_data(self, data: bytes, byte_size: int) -> None:
        """The kernel has sent more of a response, in `byte_size` bytes that the flow control counts."""
        self._held_byte_size += byte_size
        self._relay.budget.add(byte_size)
        self._waiting.append(data)
        self._send()

    def take_trailers(self, fields: Fields) -> None:
        """The kernel has ended the response."""
        if self._stream.headers_sent:
            fields = [each for each in fields if each[0] not in _OF_HEADERS]
        self._sent_all = True  # the kernel takes no more
        self._trailers = encode_trailers(fields)
        self._send()

    def take_reset(self, code: H2ErrorCode) -> None:
        """The kernel has ended the call without a status."""
        self._forget()
        if self._stream.is_open:
            self._connection.sending.reset(self._stream, code)
            self._connection.schedule_write()

    def _send(self) -> None:
        """Give the client's stream what waits for it."""
        stream, sending = self._stream, self._connection.sending
        if not stream.is_open:
            self._forget()
            return
        if stream.pending is not None and stream.pending.is_waiting:
            return
        if self._waiting:
            parts, self._waiting = self._waiting, []
            self._leaving_byte_size = self._held_byte_size
            sending.send_data(stream, parts)
            self._connection.schedule_write()
        elif self._trailers is not None:
            self._forget()
            sending.send_trailers(stream, self._trailers)
            self._connection.schedule_write()

    def _taken(self, byte_size: int) -> None:
        if byte_size:
            self._held_byte_size -= byte_size
            self._relay.budget.remove(byte_size)
            self._relay.taken(self._number, byte_size)


# ---- in the kernel's process -------------------------------------------------------------------


class CallsConnection(ServerConnection):
    """A connection over which a front door passes on calls of one client. It ends with that of the client."""

    def __init__(self, address: str | tuple[str | int, ...], identity: str, *arguments: Any) -> None:
        """`address` and `identity` are the client's, `arguments` as those of `ServerConnection`."""
        super().__init__(*arguments)
        self._address = address
        self._identity = identity

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(_ClientTransport(cast("asyncio.Transport", transport), self._address))
        self.peer = Peer(None, self._identity)

    def go_away(self) -> None:
        """The door asks its client itself, and passes on calls that were on their way."""


class _ClientTransport(asyncio.Transport):
    """A transport with the address of the client whose calls come over it."""

    def __init__(self, transport: asyncio.Transport, address: str | tuple[str | int, ...]) -> None:
        super().__init__()
        self._transport = transport
        self._address = address

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._address if name == "peername" else default

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))  # which pauses in all versions of asyncio

    def write(self, data: Any) -> None:
        self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self._transport.write_eof()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)
