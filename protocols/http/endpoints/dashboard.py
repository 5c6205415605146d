"""GET / (of browsers) and /dashboard: a page that shows the server while it runs.

Its modules are imported when it is first opened.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from protocols.http import web
from protocols.http.call import peer_of
from protocols.http.dashboard.sampler import HistorySampler
from protocols.http.responses import SERVER_HEADER

if TYPE_CHECKING:
    from kernel.serving.front_doors.interface import KernelInterface
    from protocols.http.call import HttpCall
    from protocols.http.dashboard.stream import EventStreams

PAGE_PATHS = ("/", "/dashboard")
EVENTS_PATH = "/dashboard/events"
FILE_PREFIX = "/dashboard/files/"


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
    from protocols.http.dashboard.files import PAGE  # as in `events`

    return await _file(call, PAGE, "text/html")


async def file(call: HttpCall) -> web.Response:
    """Return a file that the page loads."""
    from protocols.http.dashboard.files import FILES  # as in `events`

    name = call.names["file"]
    if name not in FILES:
        return web.Response(status=404, text="Not Found", headers=SERVER_HEADER)
    return await _file(call, name, FILES[name])


async def _file(call: HttpCall, name: str, content_type: str) -> web.Response:
    from protocols.http.dashboard.files import POLICY, content_of  # as in `events`

    body = await asyncio.to_thread(content_of, name)
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

    dashboard = call.dashboard
    if dashboard.streams is None:
        dashboard.streams = EventStreams(call.kernel, dashboard.sampler)
    return await send_events(call, dashboard.streams, peer_of(call.http))
