"""The metrics port: a front door of its own that renders the statistics whenever they are scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from aioprometheus.formats.text import TextFormatter

from protocols.http.host_load import HostLoad
from protocols.http.listener import Listener
from protocols.http.metric_families import build_registry
from protocols.http.replies import SERVER_HEADER, error_reply
from protocols.http.routes import request_path

if TYPE_CHECKING:
    import socket

    from kernel.router import Kernel


class MetricsServer:
    """Serves GET /metrics on a bound socket. A `protocols.frontend.FrontDoor`."""

    def __init__(self, kernel: Kernel, sock: socket.socket) -> None:
        """The server owns `sock` from `start` on."""
        self._kernel = kernel
        self._load = HostLoad()
        self._formatter = TextFormatter()
        self._listener = Listener(sock, "Metrics Service", self._answer)

    @property
    def title(self) -> str:
        return self._listener.title

    async def start(self) -> None:
        await self._listener.start()

    async def stop(self, grace_s: float) -> None:
        await self._listener.stop(grace_s)

    async def _answer(self, http: web.BaseRequest) -> web.Response:
        """Answer with all metrics; on other paths with nothing (Triton)."""
        if http.method != "GET":
            return error_reply(405, "Method Not Allowed", plain=True)
        body = b""
        if request_path(http.raw_path) in ("/metrics", "/metrics/"):
            body = self.render()
        return web.Response(body=body, content_type="text/plain", charset="utf-8", headers=SERVER_HEADER)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        registry = build_registry(self._kernel.catalog.ready_models(), self._load.utilization(), self._load.memory())
        text: bytes = self._formatter.marshall(registry)
        return text
