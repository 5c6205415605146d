"""The gRPC front door: one listening socket, its services, and an orderly stop."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kernel.options import AdminOptions, GrpcOptions
from kernel.serving.front_doors.server_parts import DoorFigures
from protocols.access.exposure import open_port
from protocols.access.keys import KeyReader
from protocols.access.restricted import GRPC, parse_restrictions
from protocols.frontend import FrontDoor
from protocols.grpc.admission import Admission
from protocols.grpc.compression import make_compression
from protocols.grpc.h2.keepalive import KeepaliveRules
from protocols.grpc.h2.transport import message_budget
from protocols.grpc.handlers import Handlers
from protocols.grpc.listener import GrpcListener, ListenerOptions
from protocols.grpc.metadata import make_metadata_forwarder
from protocols.grpc.open_calls import OpenCalls
from protocols.grpc.rpcs.infer import Inference
from protocols.grpc.rpcs.reflection import ReflectionService
from protocols.grpc.service import MODEL_STREAM_INFER, HealthService, InferenceService
from protocols.listening import listening_address

if TYPE_CHECKING:
    import socket

    from kernel.serving.front_doors.interface import KernelInterface
    from protocols.access.exposure import OpenPort
    from protocols.access.restricted import Restrictions
    from protocols.frontend import DoorParts
    from protocols.tls.certificates import Certificates

logger = logging.getLogger(__name__)

_DEFAULTS = GrpcOptions()
_MILLISECOND_NS = 1_000_000


def make_door(parts: DoorParts) -> GrpcServer:
    """Return the front door. Raises `BadOption`."""
    options = parts.options
    return GrpcServer(
        parts.kernel, parts.sock, options.grpc, log_access=options.log.access, admin=options.admin, keys=parts.keys
    )


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
    ) -> None:
        """The server owns `sock` from `start` on. Raises `BadOption` for options that it cannot apply.

        `keys` reads the keys of restrictions.
        """
        self._kernel = kernel
        self._sock = sock
        self.restrictions = parse_restrictions(options.restricted_protocol, GRPC, keys or KeyReader(), admin)
        self._administration = open_port("gRPC", sock, options.tls, self.restrictions)
        self._certificates: Certificates | None = None
        if options.tls is not None:
            from protocols.tls.certificates import Certificates  # few servers have any

            self._certificates = Certificates("gRPC", options.tls, ["h2"])
        self._listener_options = _listener_options(options, self._certificates, self.restrictions, log_access)
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
        await self._listener.start()
        if self._certificates is not None:
            self._certificates.start()

    def figures(self) -> DoorFigures:
        connections = 0 if self._listener is None else self._listener.connection_count
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
        listener, self._listener = self._listener, None
        self._calls.stop()
        listener.refuse_connections()
        try:
            async with asyncio.timeout(grace_s):
                await listener.wait_idle()
        except TimeoutError:
            logger.warning("gRPC calls that did not end within %g s are cancelled", grace_s)
        finally:
            await listener.close_connections()


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
