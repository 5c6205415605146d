"""The timer of one connection: asks `Lifetime` what is due, pings, lets it end, or cuts it.

One timer, which is set again only when it has rung: traffic costs it nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from protocols.grpc.h2.frames import H2ErrorCode
from protocols.grpc.h2.keepalive import Lifetime, Wanted

if TYPE_CHECKING:
    from protocols.grpc.h2.keepalive import KeepaliveRules
    from protocols.grpc.h2.streams import Stream, StreamCallbacks
    from protocols.grpc.h2.transport import CallAcceptor, ServerConnection

#: How long what was written last may take to be sent when a connection is cut.
_LAST_WORDS_S = 1.0


class LifetimeTimer:
    """Runs from its making to `stop`."""

    def __init__(self, connection: ServerConnection, rules: KeepaliveRules) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._lifetime = Lifetime(rules, time.monotonic_ns(), random.uniform(-1, 1))
        self._set()

    def stop(self) -> None:
        self._handle.cancel()

    def _set(self) -> None:
        delay_ns = self._lifetime.due_ns - time.monotonic_ns()
        self._handle = self._loop.call_later(max(delay_ns, 0) / 1e9, self._look)

    def _look(self) -> None:
        connection, machine = self._connection, self._connection.machine
        wanted = self._lifetime.look(
            time.monotonic_ns(),
            received_ns=connection.received_ns,
            calls=bool(machine.streams),
            sent_byte_size=machine.sent_byte_size,
        )
        if wanted is Wanted.CLOSE:
            connection.close()
            self._loop.call_later(_LAST_WORDS_S, connection.transport.abort)
            return
        if wanted is Wanted.PING:
            connection.ping()
        elif wanted is Wanted.DRAIN:
            connection.drain()
        self._set()


class Draining:
    """The owner of a connection that shall end: it closes behind the last call.

    A client may have made calls that it had not been told to make elsewhere; that none of them is on its way
    any more is known when it has answered a ping that was sent with the GOAWAY (RFC 9113, 6.8).
    """

    def __init__(self, connection: ServerConnection, owner: CallAcceptor) -> None:
        self._connection = connection
        self._owner = owner
        self._unanswered = connection.machine.ping_ack_count
        self._closing = False

    def opened(self, connection: ServerConnection) -> None:
        self._owner.opened(connection)

    def closed(self, connection: ServerConnection) -> None:
        self._owner.closed(connection)

    def answer(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        if self._told and stream.number > connection.machine.ping_ack_number:
            connection.machine.reset(stream, H2ErrorCode.REFUSED_STREAM)  # it may be made again elsewhere
            return None
        return self._owner.answer(connection, stream)

    def quiet(self) -> None:
        self._owner.quiet()
        if self._told and not self._closing:
            self._closing = True
            self._connection.close()

    @property
    def _told(self) -> bool:
        """Whether the client knows that it shall make no more calls."""
        return self._connection.machine.ping_ack_count > self._unanswered
