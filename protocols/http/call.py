"""One HTTP call on its way through a handler: what was asked, and how errors are to be told.

Triton sends errors of some phases as `text/plain`, although they are JSON all the same; clients compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from kernel.serving.kernel import Kernel
    from protocols.forwarding import HeaderForwarder
    from protocols.http.openapi.endpoint import OpenApi


#: Where a handler leaves the id of an inference request, for the access log.
REQUEST_ID = web.RequestKey("request_id", str)


class CallSettings(msgspec.Struct, frozen=True):
    """What is the same for every call of a server."""

    #: Bytes that JSON, raw input and inflated bodies may have.
    max_input_size: int
    openapi: OpenApi
    #: Makes parameters of headers, for /infer. None where that was not asked for.
    forwarder: HeaderForwarder | None = None


class HttpCall:
    """Handlers get one and return a response. `names` are the parts of the path that the route names."""

    __slots__ = (
        "error_headers",
        "forwarder",
        "http",
        "kernel",
        "max_input_size",
        "names",
        "openapi",
        "plain_errors",
        "reply_headers",
    )

    def __init__(
        self,
        http: web.BaseRequest,
        kernel: Kernel,
        names: dict[str, str],
        settings: CallSettings,
        *,
        plain_errors: bool,
    ) -> None:
        self.http = http
        self.kernel = kernel
        self.names = names
        self.max_input_size = settings.max_input_size
        self.openapi = settings.openapi
        self.forwarder = settings.forwarder
        #: Whether an error that is raised from now on is sent as `text/plain`.
        self.plain_errors = plain_errors
        #: Headers that an error takes with it.
        self.error_headers: dict[str, str] = {}
        #: Headers of every response; a handler adds them itself only where it begins to send.
        self.reply_headers: dict[str, str] = {}
