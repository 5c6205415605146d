"""grpclib's server with what it lacks: it can stop to listen, and knows its connections.

The only module that goes below grpclib's public interface, by subclassing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpclib.protocol import H2Protocol
from grpclib.server import Handler, Server
from hyperframe.frame import GoAwayFrame

if TYPE_CHECKING:
    import asyncio

#: "No call was refused": the highest stream number there is (RFC 9113, 6.8, graceful shutdown).
_LAST_STREAM_ID = 2**31 - 1


class Connection(H2Protocol):
    """A connection that its listener knows while it is open."""

    open_connections: set[Connection]
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = transport  # type: ignore[assignment]  # a stream socket's transport can write
        self.open_connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.open_connections.discard(self)
        super().connection_lost(exc)

    def go_away(self) -> None:
        """Tell the client to start no more calls here; those that run go on."""
        # h2's own way to send this frame ends the connection for us as well.
        self.transport.write(GoAwayFrame(stream_id=0, last_stream_id=_LAST_STREAM_ID).serialize())

    def close(self) -> None:
        """Cancel the calls and close the connection when what was written is sent."""
        self.processor.close("Server stopped")


class Listener(Server):
    """A grpclib server that ends in steps: `stop_listening`, wait for the calls, `close_connections`."""

    _connections: set[Connection] = set()

    def _protocol_factory(self) -> Connection:
        raise NotImplementedError
