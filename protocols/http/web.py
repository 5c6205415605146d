"""What we use of `aiohttp.web`, from the modules that define it.

`aiohttp.web` itself also imports its routes, static files, WebSockets and a command line, which take 1 MiB.
"""

from __future__ import annotations

from aiohttp.helpers import RequestKey
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response, StreamResponse
from aiohttp.web_server import Server

__all__ = [
    "BaseRequest",
    "RequestHandler",
    "RequestKey",
    "RequestPayloadError",
    "Response",
    "Server",
    "StreamResponse",
]
