"""The gRPC front door: one listening socket, its services, and an orderly stop."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from protocols.grpc.calls import OpenCalls
from protocols.grpc.handlers import Handlers
from protocols.grpc.infer import Inference
from protocols.grpc.listener import Listener
from protocols.grpc.service import HealthService, InferenceService

if TYPE_CHECKING:
    import socket

    from kernel.router import Kernel

logger = logging.getLogger(__name__)


class GrpcServer:
    """Serves `inference.GRPCInferenceService` and `grpc.health.v1.Health` on a bound socket."""

    def __init__(self, kernel: Kernel, sock: socket.socket) -> None:
        """The server owns `sock` from `start` on."""
        self._kernel = kernel
        self._sock = sock
        self._title = f"GRPCInferenceService at {_address_text(sock)}"
        self._calls = OpenCalls()
        self._listener: Listener | None = None

    @property
    def title(self) -> str:
        return self._title

    async def start(self) -> None:
        """Listen."""
        services = (InferenceService(self._kernel, self._calls), HealthService(self._kernel, self._calls))
        mapping = {path: handler for service in services for path, handler in service.__mapping__().items()}
        self._listener = Listener(self._sock, Inference(self._kernel, self._calls), Handlers(mapping))
        await self._listener.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new connections and no new inference, give calls that run `grace_s` seconds, and close.

        Streams end as soon as the requests that they have are answered. A caller that is cancelled
        cuts the wait short; connections are closed all the same.
        """
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


def _address_text(sock: socket.socket) -> str:
    """Return where `sock` listens: `0.0.0.0:8001`, `[::]:8001`, or the path of a Unix socket."""
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return str(name)
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
