"""grpclib's server with what it lacks: it stops in steps, and its HTTP/2 settings fit large tensors.

The only module that goes below grpclib's public interface, by subclassing.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, cast

from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from h2.settings import SettingCodes

if TYPE_CHECKING:
    from collections.abc import Collection

    from grpclib._typing import IServable
    from grpclib.protocol import AbstractHandler
    from h2.config import H2Configuration

#: Flow-control windows: a tensor of 16 MiB comes without a pause, and several of them on one connection.
CONNECTION_WINDOW_BYTE_SIZE = 64 * 2**20
STREAM_WINDOW_BYTE_SIZE = 32 * 2**20

#: h2 works on every frame: with 16 KiB ones a request of 16 MiB takes a fifth longer.
MAX_FRAME_BYTE_SIZE = 2**20

#: Calls at once on one connection; h2 alone allows 100, and a client with more streams would hang.
MAX_CONCURRENT_STREAMS = 1000

#: How long the status of a call that is cut off may take to be written.
LAST_WORD_TIMEOUT_S = 1.0

#: GOAWAY without an error that refuses no stream (RFC 9113, 6.8: graceful shutdown): length, type, flags,
#: stream 0, the highest stream number there is, no error.
_GRACEFUL_GOAWAY = struct.pack(">BHBBIII", 0, 8, 0x07, 0, 0, 2**31 - 1, 0)


class Connection(H2Protocol):
    """A connection that its listener knows while it is open."""

    def __init__(
        self,
        handler: AbstractHandler,
        config: Configuration,
        h2_config: H2Configuration,
        open_connections: set[Connection],
    ) -> None:
        super().__init__(handler, config, h2_config)
        self._open_connections = open_connections
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = cast("asyncio.Transport", transport)
        self.connection._connection.update_settings(
            {
                SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_BYTE_SIZE,
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_CONCURRENT_STREAMS,
            }
        )
        self.connection.flush()
        self._open_connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open_connections.discard(self)
        super().connection_lost(exc)

    def go_away(self) -> None:
        """Tell the client to start no more calls here; those that run go on."""
        # h2's own GOAWAY would end the connection for us as well.
        self._transport.write(_GRACEFUL_GOAWAY)

    def cancel_calls(self) -> None:
        """End the calls that run; their clients are told so."""
        for stream in tuple(self.processor.streams.values()):
            if stream.wrapper is not None:
                stream.wrapper.cancel(GRPCError(Status.UNAVAILABLE, "Server exiting: the call took too long"))

    def close(self) -> None:
        """Close the connection when what was written has been sent. Calls end without a word."""
        self.processor.close("Server stopped")


class Listener(Server):
    """A grpclib server that ends in steps: `refuse_connections`, `wait_idle`, `close_connections`."""

    def __init__(self, services: Collection[IServable]) -> None:
        """Must be called in the running loop."""
        super().__init__(
            services,
            config=Configuration(
                http2_connection_window_size=CONNECTION_WINDOW_BYTE_SIZE,
                http2_stream_window_size=STREAM_WINDOW_BYTE_SIZE,
            ),
        )
        self._connections: set[Connection] = set()

    def refuse_connections(self) -> None:
        """Accept no connection any more, and have the clients of those that exist start no call."""
        assert self._server is not None, "the listener was not started"
        self._server.close()
        for connection in tuple(self._connections):
            connection.go_away()

    async def wait_idle(self) -> None:
        """Wait until no call runs; the status of the last one has been written then."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)

    async def close_connections(self) -> None:
        """Cancel the calls that still run and close all connections."""
        for connection in tuple(self._connections):
            connection.cancel_calls()
        if tasks := self._tasks():
            # Only a client that reads nothing keeps its call from ending.
            await asyncio.wait(tasks, timeout=LAST_WORD_TIMEOUT_S)
        for connection in tuple(self._connections):
            connection.close()
        self.close()

    def _protocol_factory(self) -> Connection:
        plain = super()._protocol_factory()
        return Connection(plain.handler, plain.config, plain.h2_config, self._connections)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for handler in self._handlers for task in handler._tasks.values() if not task.done()]
