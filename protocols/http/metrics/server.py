"""The metrics port: a front door of its own that renders the statistics whenever they are scraped."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kernel.observe.custom_metrics import merged_families
from kernel.observe.generation_statistics import families_of
from kernel.observe.metrics_config import parse_metrics_config
from kernel.options import HttpOptions, MetricsOptions
from kernel.server_parts import GenerationFigures
from kernel.serving.interface import CacheFigures
from protocols.access import Category
from protocols.frontend import FrontDoor
from protocols.http import web
from protocols.http.listener import HttpListener
from protocols.http.metrics.formats import OPENMETRICS, prefers_openmetrics, to_openmetrics
from protocols.http.metrics.model_families import labels_of, render_custom, render_models, render_readiness
from protocols.http.metrics.proc import WorkerMemoryReader
from protocols.http.metrics.server_families import ServerMetrics, render_cache, render_gpus, render_memory
from protocols.http.request_rules import make_request_rules
from protocols.http.responses import RESTRICTED, SERVER_HEADER, error_response
from protocols.http.routes import request_path
from protocols.listening import is_local

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kernel.serving.interface import KernelInterface
    from protocols.access import KeyReader
    from protocols.frontend import DoorParts

logger = logging.getLogger(__name__)

_DEFAULTS = MetricsOptions()


def make_door(parts: DoorParts) -> MetricsServer:
    """Return the front door. Raises `BadOption`."""
    options = parts.options
    return MetricsServer(parts.kernel, parts.sock, options.metrics, http=options.http, keys=parts.keys)


class MetricsServer(FrontDoor):
    """Serves GET /metrics on a bound socket. A `protocols.frontend.FrontDoor`."""

    def __init__(
        self,
        kernel: KernelInterface,
        sock: socket.socket,
        options: MetricsOptions = _DEFAULTS,
        now_ns: Callable[[], int] = time.monotonic_ns,
        *,
        http: HttpOptions | None = None,
        keys: KeyReader | None = None,
    ) -> None:
        """The server owns `sock`, which is bound, from `start` on. Raises `BadOption`.

        `now_ns` is the clock of the kernel's statistics. `http` are the options of the HTTP port: its restrictions and
        its names hold here, too. `keys` reads the keys of the restrictions.
        """
        self._kernel = kernel
        self._rules = make_request_rules(http or HttpOptions(), loopback_only=is_local(sock.getsockname()), keys=keys)
        self._now_ns = now_ns
        self._config, complaints = parse_metrics_config(options.config)
        for complaint in complaints:
            logger.error("%s", complaint)
        self.server_metrics = ServerMetrics(kernel, options, now_ns())
        self.shows_gpus = options.allow_gpu_metrics
        self._memory = WorkerMemoryReader(options.interval_ms)
        #: What the last page left out. It was logged.
        self._left_out: list[str] = []
        self._listener = HttpListener(sock, "Metrics Service", self._respond)

    @property
    def title(self) -> str:
        return self._listener.title

    @property
    def administration(self) -> None:
        """None: the server cannot be administered over this port."""

    async def start(self) -> None:
        await self._listener.start()

    async def stop(self, grace_s: float) -> None:
        await self._listener.stop(grace_s)

    async def _respond(self, http: web.BaseRequest) -> web.Response:
        """Return the page of all metrics; on other paths an empty one (Triton)."""
        refusal = self._rules.refusal(http.method, Category.METRICS, http.headers.get)
        if refusal is not None:
            return error_response(RESTRICTED, refusal, plain=True)
        if http.method != "GET":
            return error_response(405, "Method Not Allowed", plain=True)
        if request_path(http.raw_path) not in ("/metrics", "/metrics/"):
            return web.Response(body=b"", content_type="text/plain", charset="utf-8", headers=SERVER_HEADER)
        await self._memory.refresh(self._kernel.figures(), self._now_ns())
        if self.shows_gpus and self._kernel.gpu_figures is not None:
            await self._kernel.gpu_figures.refresh(self._now_ns())
        if prefers_openmetrics(http.headers.getall("Accept", [])):
            headers = {**SERVER_HEADER, "Content-Type": OPENMETRICS, "Vary": "Accept"}
            return web.Response(body=to_openmetrics(self.render(openmetrics=True)), headers=headers)
        headers = {**SERVER_HEADER, "Vary": "Accept"}
        return web.Response(body=self.render(), content_type="text/plain", charset="utf-8", headers=headers)

    def render(self, *, openmetrics: bool = False) -> bytes:
        """Return the metrics in Prometheus' text format, with `openmetrics` as `to_openmetrics` takes them."""
        now_ns = self._now_ns()
        models = self._kernel.figures()
        lines = render_models(models, self._config, now_ns, time.time_ns() - now_ns if openmetrics else None)
        lines += render_readiness(self._kernel.catalog.wanted())
        lines += render_memory(models, self._memory.byte_sizes)
        for figures in self._kernel.part_figures(CacheFigures):
            lines += render_cache(models, figures, self._config, now_ns)
        lines += render_gpus(self._kernel.gpu_figures if self.shows_gpus else None)
        own = [(model.name, model.statistics.custom) for model in models]
        for generation in self._kernel.part_figures(GenerationFigures):
            served = [
                (each.name, each.version_text, tuple(sorted(labels_of(each).items())), each.statistics.custom)
                for each in models
            ]
            own += families_of(generation.statistics, served)
        custom, left_out = merged_families(own)
        lines += render_custom(custom)
        for line in left_out:
            if line not in self._left_out:
                logger.error("%s", line)
        self._left_out = left_out
        lines.append(self.server_metrics.render(now_ns))
        return "\n".join(lines).encode()
