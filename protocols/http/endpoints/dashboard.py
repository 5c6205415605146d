"""GET / (of browsers) and /dashboard: a page that shows the server while it runs, its events, and its files.

Its modules are imported when it is first opened. The files are part of the package, and load nothing from other hosts.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from protocols.http import web
from protocols.http.call import peer_of
from protocols.http.dashboard.sampler import HistorySampler
from protocols.http.responses import SERVER_HEADER, packaged_file

if TYPE_CHECKING:
    from kernel.serving.interface import KernelInterface
    from protocols.http.call import HttpCall
    from protocols.http.dashboard.stream import EventStreams

PAGE_PATHS = ("/", "/dashboard")

EVENTS_PATH = "/dashboard/events"

FILE_PREFIX = "/dashboard/files/"


_FOLDER = Path(__file__).parent.parent / "dashboard" / "static"

#: The page, and what it loads, with their types.
PAGE = "index.html"

FILES = {
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript",
    "page.js": "text/javascript",
    "stream.js": "text/javascript",
    "models.js": "text/javascript",
    "detail.js": "text/javascript",
    "charts.js": "text/javascript",
    "traffic.js": "text/javascript",
    "chat.js": "text/javascript",
    "example.js": "text/javascript",
    "tensors.js": "text/javascript",
    "pictures.js": "text/javascript",
    "samples.js": "text/javascript",
    "settings.js": "text/javascript",
}

#: Nothing but files of this server, no scripts and styles within the page, no frame around it, no form that leaves it,
#: and no text that becomes HTML.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)


class Dashboard:
    """The page of one server."""

    def __init__(self, kernel: KernelInterface) -> None:
        #: None until the page is opened.
        self.streams: EventStreams | None = None
        self.sampler = HistorySampler(kernel)

    def start(self) -> None:
        """Keep the history of the last minutes from now on. `close` follows."""
        self.sampler.start()

    def close(self) -> None:
        """End what is sent: the server stops."""
        self.sampler.stop()
        if self.streams is not None:
            self.streams.close()


def asks_for_page(path: str, http: web.BaseRequest) -> bool:
    """Whether a request may have a part of the page: `/` is for browsers. Others find nothing there, as in Triton."""
    return path != "/" or (http.method == "GET" and "text/html" in http.headers.get("Accept", ""))


async def page(call: HttpCall) -> web.Response:
    """Return the page."""
    return await _file(call, PAGE, "text/html")


async def file(call: HttpCall) -> web.Response:
    """Return a file that the page loads."""
    name = call.names["file"]
    if name not in FILES:
        return web.Response(status=404, text="Not Found", headers=SERVER_HEADER)
    return await _file(call, name, FILES[name])


async def _file(call: HttpCall, name: str, content_type: str) -> web.Response:
    body = await asyncio.to_thread(packaged_file, _FOLDER / name)
    headers = {
        **SERVER_HEADER,
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",  # a new release has a new page
    }
    return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)


async def events(call: HttpCall) -> web.StreamResponse:
    """Send what happens, until the client goes away. Raises `Unavailable` if too many do so already."""
    from protocols.http.dashboard.stream import EventStreams, send_events  # most servers have no viewer

    dashboard = call.door.dashboard
    if dashboard.streams is None:
        dashboard.streams = EventStreams(call.kernel, dashboard.sampler)
    return await send_events(call, dashboard.streams, peer_of(call.http))
