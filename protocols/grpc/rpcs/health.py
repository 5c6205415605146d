"""grpc.health.v1: whether the server takes requests. One status for the whole server, as in Triton.

Check ignores which service is asked for, as Triton does; Watch, which Triton does not have, keeps to the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kernel.errors import ServingError
from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.rpc import receive

if TYPE_CHECKING:
    from grpclib.server import Stream

    from kernel.serving.front_doors.interface import KernelInterface
    from protocols.grpc.rpc import Caller

#: How often a watched status is checked: there is no event for a change, and orchestrators ask as often.
WATCH_INTERVAL_S = 1.0

#: What can be watched; the empty name is the server as a whole.
WATCHED_SERVICES = ("", "inference.GRPCInferenceService", "grpc.health.v1.Health")


class Health:
    """The health service; the service's name in a request is ignored."""

    def __init__(self, kernel: KernelInterface) -> None:
        self._kernel = kernel

    async def check(self, message: HealthCheckRequest, caller: Caller) -> HealthCheckResponse:
        """Return whether the server is ready. Raises `Unavailable` while it stops."""
        return HealthCheckResponse(status=_status(await self._kernel.server_is_ready()))


class WatchCall:
    """One Watch call: the status now, and again whenever it has changed, until the client goes."""

    def __init__(
        self,
        kernel: KernelInterface,
        stream: Stream[HealthCheckRequest, HealthCheckResponse],
        interval_s: float = WATCH_INTERVAL_S,
    ) -> None:
        self._kernel = kernel
        self._stream = stream
        self._interval_s = interval_s
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Send statuses until the server stops."""
        message = await receive(self._stream)
        known = message is None or message.service in WATCHED_SERVICES
        shown: HealthCheckResponse.ServingStatus | None = None
        while True:
            stopped = self._stopped.is_set()
            status = _status(not stopped and await self._ready()) if known else HealthCheckResponse.SERVICE_UNKNOWN
            if status is not shown:
                await self._stream.send_message(HealthCheckResponse(status=status))
                shown = status
            if stopped:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._stopped.wait()

    def stop(self) -> None:
        """Send the last status, that of a server that stops, and end."""
        self._stopped.set()

    async def _ready(self) -> bool:
        try:
            return await self._kernel.server_is_ready()
        except ServingError:  # the server exits
            return False


def _status(ready: bool) -> HealthCheckResponse.ServingStatus:
    return HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
