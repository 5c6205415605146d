"""The timer of one connection: asks `Lifetime` what is due, and pings, drains or closes the connection.

There is one timer, which is set again only when it has fired, so messages of the connection add no work.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from protocols.grpc.h2.frames import H2ErrorCode
from protocols.grpc.h2.keepalive import Lifetime, LifetimeAction

if TYPE_CHECKING:
    from protocols.grpc.h2.keepalive import KeepaliveRules
    from protocols.grpc.h2.streams import Stream, StreamCallbacks
    from protocols.grpc.h2.transport import CallAcceptor, ServerConnection

#: How long the last frames may take to be written when a connection is closed.
_LAST_FRAMES_TIMEOUT_S = 1.0


class LifetimeTimer:
    """Runs from its construction to `stop`."""

    def __init__(self, connection: ServerConnection, rules: KeepaliveRules) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._lifetime = Lifetime(rules, time.monotonic_ns(), random.uniform(-1, 1))
        self._set()

    def stop(self) -> None:
        self._handle.cancel()

    def _set(self) -> None:
        delay_ns = self._lifetime.due_ns - time.monotonic_ns()
        self._handle = self._loop.call_later(max(delay_ns, 0) / 1e9, self._act)

    def _act(self) -> None:
        connection, parts = self._connection, self._connection.http2
        action = self._lifetime.next_action(
            time.monotonic_ns(),
            last_received_ns=connection.last_received_ns,
            has_calls=bool(parts.streams.by_id),
            sent_byte_size=parts.sending.write_queue.sent_byte_size,
        )
        if action is LifetimeAction.CLOSE:
            connection.close()
            self._loop.call_later(_LAST_FRAMES_TIMEOUT_S, connection.transport.abort)
            return
        if action is LifetimeAction.PING:
            connection.ping()
        elif action is LifetimeAction.DRAIN:
            connection.drain()
        self._set()


class DrainingAcceptor:
    """Stands before the acceptor of a connection that is too old, and closes it when its last call has ended.

    A client may have started calls before it received the GOAWAY. Once it has acknowledged a ping that was sent
    behind the GOAWAY, none of them is on its way any more (RFC 9113, 6.8): later calls are refused.
    """

    def __init__(self, connection: ServerConnection, acceptor: CallAcceptor) -> None:
        self._connection = connection
        self._acceptor = acceptor
        self._receiving = connection.http2.receiving
        self._ping_ack_count = self._receiving.ping_ack_count
        self._closing = False

    def connection_opened(self, connection: ServerConnection) -> None:
        self._acceptor.connection_opened(connection)

    def connection_closed(self, connection: ServerConnection) -> None:
        self._acceptor.connection_closed(connection)

    def accept_call(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        if self._client_knows and stream.id > self._receiving.ping_ack_last_id:
            connection.sending.reset(stream, H2ErrorCode.REFUSED_STREAM)  # it may be made again elsewhere
            return None
        return self._acceptor.accept_call(connection, stream)

    def connection_idle(self) -> None:
        self._acceptor.connection_idle()
        if self._client_knows and not self._closing:
            self._closing = True
            self._connection.close()

    @property
    def _client_knows(self) -> bool:
        """Whether the client has received the GOAWAY."""
        return self._receiving.ping_ack_count > self._ping_ack_count
