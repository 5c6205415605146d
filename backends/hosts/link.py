"""One end of a control connection on the event loop, between a server and an agent, or a server and its broker.

It sends and takes messages, and notices whether the other end lives.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import msgspec

from backends.hosts.messages import BEAT_S, LOST_BEATS, MAX_MESSAGE, Silence, framed
from backends.transport.framing import FrameReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.hosts.messages import AgentMessage

logger = logging.getLogger(__name__)

#: The longest message of an agent in bytes: a long one has a few bytes for each worker, or a text.
MAX_FROM_AGENT = 1 << 20

#: The longest text of an agent in characters. A character has up to four bytes.
MAX_TEXT = 64 << 10

_Received = TypeVar("_Received")

#: Above this number of unsent bytes, lines that workers print are dropped. Above ten times of it, the connection ends.
#: A server that does not read makes no heartbeats either, so this lasts for seconds at most.
MAX_UNSENT = 8 << 20


class Link(asyncio.Protocol, Generic[_Received]):
    """A control connection whose peer has proved that it has the token.

    `on_message` gets each message; an exception of it ends the connection. `on_lost` is called once, with the cause.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[_Received],
        beat: Callable[[], AgentMessage],
        on_message: Callable[[_Received], None],
        on_lost: Callable[[str], None],
        lost_beats: int = LOST_BEATS,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        """`beat` makes the message that is sent twice a second. After `lost_beats` of them without anything received
        the peer is lost. A message of it has at most `max_message` bytes."""
        self._decoder = decoder
        self._beat = beat
        self._on_message = on_message
        self._on_lost: Callable[[str], None] | None = on_lost
        self._reader = FrameReader(max_message)
        self._lost_beats = lost_beats
        self._silence = Silence(lost_beats)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, sock: socket.socket) -> None:
        """Use this socket, and own it. Raises `OSError`."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            await loop.create_unix_connection(lambda: self, sock=sock)
        else:
            await loop.create_connection(lambda: self, sock=sock)

    @property
    def open(self) -> bool:
        """Whether the connection lives, as far as is known."""
        return self._on_lost is not None and self._transport is not None

    @property
    def crowded(self) -> bool:
        """Whether lines of workers are dropped, because too many bytes are unsent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNSENT

    def send(self, message: AgentMessage) -> None:
        """Send a message. A connection that has ended drops it."""
        if self._transport is None or self._on_lost is None:
            return
        self._transport.write(framed(message))
        if self._transport.get_write_buffer_size() > 10 * MAX_UNSENT + MAX_MESSAGE:
            self.end("it does not read")

    def end(self, cause: str) -> None:
        """End the connection; `on_lost` gets the cause, unless the connection has ended before."""
        on_lost, self._on_lost = self._on_lost, None
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if on_lost is not None:
            on_lost(cause)

    def close(self) -> None:
        """End the connection after what was sent, without `on_lost`."""
        self._on_lost = None
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.Protocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._schedule()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._silence.heard()
        try:
            for raw in self._reader.feed(data):
                if self._on_lost is None:
                    return
                self._on_message(self._decoder.decode(raw))
        except (ValueError, msgspec.DecodeError) as error:
            self.end(f"it sent an invalid message: {str(error)[:1000]}")

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.end("its connection ended" if exc is None else f"its connection failed: {exc}")

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._tick)

    def _tick(self) -> None:
        if self._silence.beat():
            self.end(f"nothing was received from it for {BEAT_S * self._lost_beats:g} s")
            return
        self.send(self._beat())
        self._schedule()


#: When the system probes an idle connection, and the time between two probes, in seconds; how many probes. NAT and
#: firewalls between the hosts forget connections that are idle for minutes.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


def prepare_socket(sock: socket.socket) -> None:
    """Let small messages leave at once, and let the system notice when an idle connection is cut."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
