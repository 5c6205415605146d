"""The gRPC listener: accepts connections, gives their calls to who answers them, and stops in steps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import msgspec
from grpclib.const import Status

from protocols.grpc.access_log import WatchingOwner
from protocols.grpc.framing import ACCEPTED_ENCODINGS
from protocols.grpc.h2.headers import status_block
from protocols.grpc.h2.transport import ServerConnection
from protocols.grpc.rpcs.infer import InferCall
from protocols.grpc.service import MODEL_INFER
from protocols.listening import listen

if TYPE_CHECKING:
    import socket
    import ssl

    from protocols.grpc.admission import Admission
    from protocols.grpc.h2.keepalive import KeepaliveRules
    from protocols.grpc.h2.streams import Stream, StreamCallbacks
    from protocols.grpc.handlers import Handlers
    from protocols.grpc.rpcs.infer import Inference

#: How often connections are looked at for what waits too long.
CHECK_INTERVAL_S = 5.0

#: How long the status of a call that is cut off may take to be written.
LAST_WORD_TIMEOUT_S = 1.0


class Terms(msgspec.Struct, frozen=True):
    """On which conditions connections and calls are taken."""

    #: None for connections without TLS.
    tls: ssl.SSLContext | None
    keepalive: KeepaliveRules
    #: None where every call may be made by everybody.
    admission: Admission | None
    #: Whether every call is logged.
    log_access: bool = False


class GrpcListener:
    """Ends in steps: `refuse_connections`, `wait_idle`, `close_connections`."""

    def __init__(self, sock: socket.socket, terms: Terms, inference: Inference, handlers: Handlers) -> None:
        """The listener owns `sock` from `start` on."""
        self._sock = sock
        self._terms = terms
        self._admission = terms.admission
        self._inference = inference
        self._handlers = handlers
        self._connections: set[ServerConnection] = set()
        self._server: asyncio.Server | None = None
        self._check: asyncio.TimerHandle | None = None
        #: Set whenever a connection may have become idle while the listener waits for that.
        self._quiet: asyncio.Event | None = None

    async def start(self) -> None:
        terms = self._terms
        owner = WatchingOwner(self) if terms.log_access else self
        self._server = await listen(
            self._sock,
            lambda: ServerConnection(owner, terms.keepalive),
            terms.tls,
            tls_shutdown_timeout_s=LAST_WORD_TIMEOUT_S,
        )
        self._check = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_progress)

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    # ---- protocols.grpc.h2.transport.CallAcceptor ----------------------------------------------------

    def opened(self, connection: ServerConnection) -> None:
        self._connections.add(connection)

    def closed(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self.quiet()

    def answer(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        head = stream.head
        if self._admission is not None and (text := self._admission.refusal(head)) is not None:
            connection.machine.send_trailers(stream, status_block(Status.UNAVAILABLE.value, text))
            return None
        if head.is_grpc:
            if head.encoding not in ACCEPTED_ENCODINGS:
                more = [("grpc-accept-encoding", ",".join(ACCEPTED_ENCODINGS))]
                text = f"unknown grpc-encoding {head.encoding!r}"
                connection.machine.send_trailers(stream, status_block(Status.UNIMPLEMENTED.value, text, more))
                return None
            if not head.timeout_valid:
                block = status_block(Status.UNKNOWN.value, "Invalid grpc-timeout header")
                connection.machine.send_trailers(stream, block)
                return None
            if head.path == MODEL_INFER:
                call = InferCall(self._inference, connection, stream)
                if stream.whole is None or head.timeout_s is not None:
                    call.prepare()
                return call
        return self._handlers.begin(connection, stream)

    def quiet(self) -> None:
        if self._quiet is not None:
            self._quiet.set()

    def _check_progress(self) -> None:
        now_ns = time.monotonic_ns()
        for connection in tuple(self._connections):
            connection.check_progress(now_ns)
        self._check = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_progress)

    # ---- the end -----------------------------------------------------------------------------

    def refuse_connections(self) -> None:
        """Accept no connection any more, and have the clients of those that exist start no call."""
        assert self._server is not None, "the listener was not started"
        self._server.close()
        for connection in tuple(self._connections):
            connection.go_away()

    async def wait_idle(self) -> None:
        """Wait until no call runs; the status of the last one has been written then."""
        self._quiet = asyncio.Event()
        while not all(connection.idle for connection in self._connections):
            self._quiet.clear()
            await self._quiet.wait()
        await self._wait_for_handlers()

    async def close_connections(self) -> None:
        """End the calls that still run and close all connections."""
        for connection in tuple(self._connections):
            connection.cut_off_calls()
        # Only a client that reads nothing keeps a handler from ending.
        await self._wait_for_handlers(LAST_WORD_TIMEOUT_S)
        for connection in tuple(self._connections):
            connection.close()
        if self._check is not None:
            self._check.cancel()
        await self._wait_for_handlers(LAST_WORD_TIMEOUT_S)
        await self._wait_closed()

    async def _wait_closed(self) -> None:
        """Wait until the clients have what was written; cut those that do not take it."""
        self._quiet = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_TIMEOUT_S):
                while self._connections:
                    self._quiet.clear()
                    await self._quiet.wait()
        for connection in tuple(self._connections):
            connection.transport.abort()

    async def _wait_for_handlers(self, timeout_s: float | None = None) -> None:
        if self._handlers.running:
            await asyncio.wait(tuple(self._handlers.running), timeout=timeout_s)
