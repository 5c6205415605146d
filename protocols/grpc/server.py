"""The gRPC front door: `GrpcServer` has one listening socket, its services, and an orderly stop.

`GrpcListener` accepts connections, finds what responds to their calls, and stops in steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING

import msgspec
from grpclib.const import Status

from kernel.background import BackgroundTasks
from kernel.errors import NoDescriptorLeft
from kernel.options import AdminOptions, GrpcOptions
from kernel.server_parts import DoorFigures
from kernel.texts import MAX_TEXT_BYTE_SIZE, limited
from protocols.access import GRPC, Category, KeyReader, Restriction, open_port, parse_restrictions
from protocols.frontend import FrontDoor
from protocols.grpc.access_log import LoggingAcceptor
from protocols.grpc.compression import make_compression
from protocols.grpc.framing import ACCEPTED_ENCODINGS, MessageMemory
from protocols.grpc.h2.headers import status_trailers
from protocols.grpc.h2.limits import KeepaliveRules
from protocols.grpc.h2.transport import ServerConnection, message_budget
from protocols.grpc.handlers import Handlers
from protocols.grpc.intake import make_metadata_forwarder
from protocols.grpc.relay import CallsConnection
from protocols.grpc.rpc import OpenCalls
from protocols.grpc.rpcs.infer import InferCall, Inference
from protocols.grpc.rpcs.standard_services import HealthService, ReflectionService
from protocols.grpc.service import (
    MODEL_INFER,
    MODEL_LOAD,
    MODEL_STREAM_INFER,
    Admission,
    InferenceService,
)
from protocols.listening import Arrival, Gate, NewConnection, adopt, listen, listening_address
from protocols.loop_budgets import IterationBudget
from protocols.request_limits import MAX_CONTROL_BYTE_SIZE

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from kernel.serving.interface import KernelInterface
    from protocols.access import OpenPort, Restrictions
    from protocols.frontend import DoorParts, DoorProcesses
    from protocols.grpc.h2.streams import Stream, StreamCallbacks
    from protocols.tls import Certificates

logger = logging.getLogger(__name__)

_DEFAULTS = GrpcOptions()

_MILLISECOND_NS = 1_000_000

#: Calls with tensors or files in their messages, besides MODEL_INFER.
_WITH_LARGE_MESSAGES = frozenset({MODEL_STREAM_INFER, MODEL_LOAD})

#: How often connections are checked for what waits too long.
CHECK_INTERVAL_S = 5.0

#: How long the status of a call that was terminated may take to be sent.
LAST_RESPONSE_TIMEOUT_S = 1.0


def make_door(parts: DoorParts) -> GrpcServer:
    """Return the front door. Raises `BadOption`."""
    options = parts.options
    return GrpcServer(
        parts.kernel, parts.sock, options.grpc, log_access=options.log.access, admin=options.admin, keys=parts.keys,
        processes=parts.processes,
    )  # fmt: skip


class GrpcServer(FrontDoor):
    """Serves `inference.GRPCInferenceService`, health and reflection on a bound socket."""

    def __init__(
        self,
        kernel: KernelInterface,
        sock: socket.socket,
        options: GrpcOptions = _DEFAULTS,
        *,
        log_access: bool = False,
        admin: AdminOptions | None = None,
        keys: KeyReader | None = None,
        processes: DoorProcesses | None = None,
    ) -> None:
        """The server owns `sock` from `start` on. Raises `BadOption` for options that it cannot apply.

        `keys` reads the keys of restrictions. `processes` are front doors in processes of their own, which need a port
        without TLS.
        """
        self._kernel = kernel
        self._sock = sock
        self.restrictions = parse_restrictions(options.restricted_protocol, GRPC, keys or KeyReader(), admin)
        self._administration = open_port("gRPC", sock, options.tls, self.restrictions)
        self._certificates: Certificates | None = None
        if options.tls is not None:
            from protocols.tls import Certificates  # few servers have any

            self._certificates = Certificates("gRPC", options.tls, ["h2"])
        self._listener_options = _listener_options(options, self._certificates, self.restrictions, log_access)
        self._processes = processes
        self._door_settings = door_settings(options, self._listener_options, self.restrictions)
        #: For connections of doors, as for those of clients.
        self._gate = Gate(lambda: ServerConnection(_RefusingAcceptor()))
        self._adopting = BackgroundTasks()
        self._forwarder = make_metadata_forwarder(options.header_forward_pattern)
        self._compression = make_compression(options.infer_response_compression_level)
        self._max_response_pool_size = options.max_response_pool_size
        self._title = f"GRPCInferenceService at {listening_address(sock)}"
        self._calls = OpenCalls()
        self._listener: GrpcListener | None = None

    @property
    def title(self) -> str:
        return self._title

    @property
    def administration(self) -> OpenPort:
        return self._administration

    async def start(self) -> None:
        """Listen."""
        kernel, calls, messages = self._kernel, self._calls, message_budget()
        services = (
            InferenceService(
                kernel, calls, self.restrictions.admin, self._forwarder, self._max_response_pool_size, messages
            ),
            HealthService(kernel, calls),
            ReflectionService(),
        )
        inference = Inference(kernel, calls, self._forwarder, self._compression)
        inference.messages = messages
        mapping = {path: handler for service in services for path, handler in service.__mapping__().items()}
        self._listener = GrpcListener(
            self._sock,
            self._listener_options,
            inference,
            Handlers(mapping, self._compression, frozenset({MODEL_STREAM_INFER})),
        )
        await self._listener.start(self._processes)
        if self._certificates is not None:
            self._certificates.start()
        if self._processes is not None:
            self._processes.open("protocols.grpc.doors", self._door_settings, None, self._take_calls)

    def _take_calls(self, sock: socket.socket, address: str | tuple[str | int, ...], identity: str) -> None:
        """Serve calls of one client that a process of a front door passes on."""
        listener = self._listener
        if listener is None:
            sock.close()
            return
        connect = functools.partial(listener.make_connection, functools.partial(CallsConnection, address, identity))
        self._adopting.start(adopt(sock, lambda: NewConnection(self._gate, connect)))

    def figures(self) -> DoorFigures:
        connections = 0 if self._listener is None else self._listener.connection_count
        if self._processes is not None:
            connections += self._processes.connection_count
        return DoorFigures("grpc", connections, None if self._certificates is None else self._certificates.expiry_s)

    async def stop(self, grace_s: float) -> None:
        """Accept no new connections and no new inference, give calls that run `grace_s` seconds, and close.

        Streams end as soon as the requests that they have received have their responses. If the caller is cancelled,
        the wait ends, and connections are closed nevertheless.
        """
        if self._certificates is not None:
            self._certificates.stop()
        if self._listener is None:
            return
        listener, processes = self._listener, self._processes
        try:
            async with asyncio.TaskGroup() as tasks:
                if processes is not None:
                    # What doors pass on meanwhile is served here.
                    tasks.create_task(processes.drain(grace_s))
                tasks.create_task(listener.stop(self._calls, grace_s))
        finally:
            self._listener = None


def _listener_options(
    options: GrpcOptions, certificates: Certificates | None, restrictions: Restrictions, log_access: bool
) -> ListenerOptions:
    rules = KeepaliveRules(
        time_ns=options.keepalive_time_ms * _MILLISECOND_NS,
        timeout_ns=options.keepalive_timeout_ms * _MILLISECOND_NS,
        permit_without_calls=options.keepalive_permit_without_calls,
        max_pings_without_data=options.http2_max_pings_without_data,
        min_recv_ping_interval_ns=options.http2_min_recv_ping_interval_without_data_ms * _MILLISECOND_NS,
        max_ping_strikes=options.http2_max_ping_strikes,
        max_age_ns=options.max_connection_age_ms * _MILLISECOND_NS or None,
        max_age_grace_ns=options.max_connection_age_grace_ms * _MILLISECOND_NS or None,
    )
    return ListenerOptions(
        tls=None if certificates is None else certificates.context,
        keepalive=rules,
        admission=Admission(restrictions) if restrictions else None,
        log_access=log_access,
    )


class GrpcDoorSettings(msgspec.Struct, frozen=True):
    """What the gRPC server of a door needs of the options."""

    keepalive: KeepaliveRules
    header_forward_pattern: str
    compression_level: str
    max_response_pool_size: int | None
    log_access: bool
    #: The header that inference calls must have; None if they need none.
    restriction: Restriction | None


def door_settings(options: GrpcOptions, listener: ListenerOptions, restrictions: Restrictions) -> bytes:
    """Return the settings of doors, for `protocols.grpc.doors.open_connections`."""
    return msgspec.msgpack.encode(
        GrpcDoorSettings(
            listener.keepalive, options.header_forward_pattern, options.infer_response_compression_level,
            options.max_response_pool_size, listener.log_access, restrictions.of(Category.INFERENCE),
        )
    )  # fmt: skip


class ListenerOptions(msgspec.Struct, frozen=True):
    """The conditions for connections and calls."""

    #: None for connections without TLS.
    tls: ssl.SSLContext | None
    keepalive: KeepaliveRules
    #: None if no call is restricted.
    admission: Admission | None
    #: Whether every call is logged.
    log_access: bool = False


class _RefusingAcceptor:
    """A `protocols.grpc.h2.transport.CallAcceptor` for a connection that is refused.

    It responds to calls: after a GOAWAY clients connect again and again, and their callers learn nothing.
    """

    def connection_opened(self, connection: ServerConnection) -> None:
        """The connection is not counted."""

    def connection_closed(self, connection: ServerConnection) -> None:
        """The connection was not counted."""

    def accept_call(self, connection: ServerConnection, stream: Stream) -> None:
        refusal = status_trailers(Status.UNAVAILABLE.value, NoDescriptorLeft().text)
        connection.sending.send_trailers(stream, refusal)

    def connection_idle(self) -> None:
        """Nobody waits for that."""


class GrpcListener:
    """Ends in steps: `refuse_connections`, `wait_idle`, `close_connections`."""

    #: What responds to unary inference.
    infer_call: type[InferCall] = InferCall

    def __init__(
        self, sock: socket.socket | None, options: ListenerOptions, inference: Inference, handlers: Handlers
    ) -> None:
        """The listener owns `sock` from `start` on. Without one it has the connections that it is given."""
        self._sock = sock
        self._options = options
        self._admission = options.admission
        self._inference = inference
        self._handlers = handlers
        self._connections: set[ServerConnection] = set()
        self._server: asyncio.Server | None = None
        self._check: asyncio.TimerHandle | None = None
        #: Set whenever a connection may have become idle, while the listener waits for that.
        self._became_idle: asyncio.Event | None = None

    def open(self) -> None:
        """Be ready for connections."""
        kernel = self._inference.kernel
        self._budget = IterationBudget()
        self._messages = self._inference.messages or message_budget()
        self._memory = MessageMemory(kernel.budget, kernel.memory_refusals.full)
        self._check = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_progress)

    async def start(self, processes: DoorProcesses | None = None) -> None:
        """Listen. New connections go to `processes` as long as there are some."""
        assert self._sock is not None, "a listener without a socket"
        self.open()
        make: Callable[[], asyncio.BaseProtocol] = self.make_connection
        self._server = await listen(
            self._sock,
            make if processes is None else functools.partial(Arrival, processes.give, make),
            self._options.tls,
            make_refusal=lambda: ServerConnection(_RefusingAcceptor()),
            tls_shutdown_timeout_s=LAST_RESPONSE_TIMEOUT_S,
        )

    def make_connection(self, of_door: Callable[..., CallsConnection] | None = None) -> ServerConnection:
        """Return the protocol of a new connection: of a client, or of a door that passes on and logs its calls."""
        shared = self._budget, self._messages, self._memory
        if of_door is not None:
            return of_door(self, None, *shared)
        acceptor = LoggingAcceptor(self) if self._options.log_access else self
        return ServerConnection(acceptor, self._options.keepalive, *shared)

    @property
    def connection_count(self) -> int:
        """How many connections clients have."""
        return sum(1 for each in self._connections if not isinstance(each, CallsConnection))

    # ---- protocols.grpc.h2.transport.CallAcceptor ----------------------------------------------------

    def connection_opened(self, connection: ServerConnection) -> None:
        self._connections.add(connection)

    def connection_closed(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self.connection_idle()

    def accept_call(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        request_head = stream.request_head
        if self._admission is not None:
            peer = connection.transport.get_extra_info("peername")
            if (text := self._admission.refusal(request_head, peer)) is not None:
                connection.sending.send_trailers(stream, status_trailers(Status.UNAVAILABLE.value, text))
                return None
        if request_head.is_grpc:
            if request_head.encoding not in ACCEPTED_ENCODINGS:
                more = [("grpc-accept-encoding", ",".join(ACCEPTED_ENCODINGS))]
                text = f"unknown grpc-encoding {limited(request_head.encoding, MAX_TEXT_BYTE_SIZE)!r}"
                connection.sending.send_trailers(stream, status_trailers(Status.UNIMPLEMENTED.value, text, more))
                return None
            if not request_head.timeout_valid:
                trailers = status_trailers(Status.UNKNOWN.value, "Invalid grpc-timeout header")
                connection.sending.send_trailers(stream, trailers)
                return None
            if request_head.path == MODEL_INFER:
                call = self.infer_call(self._inference, connection, stream)
                if stream.complete_message is None or request_head.timeout_s is not None:
                    call.expect()
                return call
        if request_head.path not in _WITH_LARGE_MESSAGES:
            stream.message_reader.limit(MAX_CONTROL_BYTE_SIZE)
        return self._handlers.begin(connection, stream)

    def connection_idle(self) -> None:
        if self._became_idle is not None:
            self._became_idle.set()

    def _check_progress(self) -> None:
        now_ns = time.monotonic_ns()
        for connection in tuple(self._connections):
            connection.check_progress(now_ns)
        self._check = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_progress)

    # ---- the end -----------------------------------------------------------------------------

    async def stop(self, calls: OpenCalls, grace_s: float) -> None:
        """Accept nothing new, give calls that run `grace_s` seconds, and close; `calls` are those of the listener."""
        calls.stop()
        self.refuse_connections()
        try:
            async with asyncio.timeout(grace_s):
                await self.wait_idle()
        except TimeoutError:
            logger.warning("gRPC calls that did not end within %g s are cancelled", grace_s)
        finally:
            await self.close_connections()

    def refuse_connections(self) -> None:
        """Accept no more connections, and ask the clients of the others to start no more calls."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.go_away()

    async def wait_idle(self) -> None:
        """Wait until no call runs, and the status of the last one has been written."""
        self._became_idle = asyncio.Event()
        while not all(connection.idle for connection in self._connections):
            self._became_idle.clear()
            await self._became_idle.wait()
        await self._wait_for_handlers()

    async def close_connections(self) -> None:
        """Terminate the calls that still run, and close all connections."""
        for connection in tuple(self._connections):
            connection.terminate_calls()
        # Only a client that reads nothing keeps a handler from ending.
        await self._wait_for_handlers(LAST_RESPONSE_TIMEOUT_S)
        for connection in tuple(self._connections):
            connection.close()
        if self._check is not None:
            self._check.cancel()
        await self._wait_for_handlers(LAST_RESPONSE_TIMEOUT_S)
        await self._wait_closed()

    async def _wait_closed(self) -> None:
        """Wait until the clients have received what was written; abort the connections of those that do not read."""
        self._became_idle = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_RESPONSE_TIMEOUT_S):
                while self._connections:
                    self._became_idle.clear()
                    await self._became_idle.wait()
        for connection in tuple(self._connections):
            connection.transport.abort()

    async def _wait_for_handlers(self, timeout_s: float | None = None) -> None:
        if self._handlers.running:
            await asyncio.wait(tuple(self._handlers.running), timeout=timeout_s)
