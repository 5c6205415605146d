"""Where HTTP meets the log: Triton's line for a request that has come (--log-verbose=1), the access log (--log-access).

First the lines themselves, then who writes them: aiohttp's logger and handler, and `ConnectionAccessLog` for requests
that the fast path serves.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic_ns
from typing import TYPE_CHECKING

from aiohttp.abc import AbstractAccessLogger

from kernel.observe.access_log import Access, log_access, peer_text
from protocols.http import web
from protocols.http.aiohttp_internals import is_response_begun
from protocols.http.call import REQUEST_ID
from protocols.http.routes import find_endpoint, request_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from protocols.http.fast.call import FastCall
    from protocols.http.fast.request_heads import HttpRequestHead
    from protocols.http.fast.response_bytes import ResponseBytes

logger = logging.getLogger(__name__)

#: The numbers that tritonserver's log has for methods: its HTTP library's.
_METHODS = {"GET": 0, "HEAD": 1, "POST": 2, "PUT": 3, "DELETE": 4, "OPTIONS": 8, "TRACE": 9, "CONNECT": 10, "PATCH": 11}

_OTHER_METHOD = 16

#: When a request came, and from which peer: a client that has disconnected has no address any more. Absent for what is
#: not HTTP.
_BEGIN = web.RequestKey("begin", tuple)

#: What nginx writes as the status of a request whose client disconnected before it had its response.
CLIENT_GONE = "499"


def log_http_request(method: str, target: str) -> None:
    """Write Triton's line for a request that has come. It is shown with --log-verbose=1."""
    logger.debug("HTTP request: %d %s", _METHODS.get(method, _OTHER_METHOD), target.partition("?")[0])


def log_http_access(
    peer: str,
    method: str,
    target: str,
    status: str,
    begin_ns: int,
    *,
    bytes_in: int | None,
    bytes_out: int | None,
    request_id: str,
) -> None:
    """Write the line of a request that came at `begin_ns`; `bytes_out` counts the head of the response, too."""
    found = find_endpoint(request_path(target), lambda model, label: True)
    names = found[1] if found is not None else {}
    log_access(
        Access(
            peer=peer,
            method=method,
            path=target,
            status=status,
            duration_ns=monotonic_ns() - begin_ns,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            model=names.get("model", ""),
            version=names.get("version", ""),
            request_id=request_id,
        )
    )


class AiohttpAccessLogger(AbstractAccessLogger):
    """Called by aiohttp when it has sent a response; `time` is in seconds, and with uvloop in whole milliseconds."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        _log(request, str(response.status), int(time * 1e9), response.body_length)


class LoggedHandler:
    """Responds as `handler` does, and logs the requests whose clients do not wait for the response."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        self._handler = handler

    async def __call__(self, http: web.BaseRequest) -> web.StreamResponse:
        http[_BEGIN] = (monotonic_ns(), _peer(http))
        try:
            return await self._handler(http)
        except asyncio.CancelledError:
            _log(http, CLIENT_GONE, 0, None)
            raise
        except ConnectionError:
            if is_response_begun(http):  # else aiohttp tries to send an error, and calls the logger
                _log(http, CLIENT_GONE, 0, None)
            raise


def _peer(http: web.BaseRequest) -> str:
    transport = http.transport
    return peer_text(transport.get_extra_info("peername")) if transport is not None else ""


def _log(http: web.BaseRequest, status: str, duration_ns: int, bytes_out: int | None) -> None:
    """Write the line of a request; `duration_ns` is for one that no handler has seen."""
    begin_ns, peer = http.get(_BEGIN) or (monotonic_ns() - duration_ns, _peer(http))
    log_http_access(
        peer,
        http.method,
        http.raw_path,
        status,
        begin_ns,
        bytes_in=http.content_length if http.body_exists else 0,
        bytes_out=bytes_out,
        request_id=http.get(REQUEST_ID, ""),
    )


_METHOD = "POST"


class ConnectionAccessLog:
    """Logs the requests of one connection."""

    def __init__(self, transport: asyncio.BaseTransport, *, access: bool, verbose: bool) -> None:
        """With `access` there is a line after each response, with `verbose` one when a request comes."""
        self._access = access
        self._verbose = verbose
        #: A client that has disconnected has no address any more.
        self._peer = peer_text(transport.get_extra_info("peername"))

    def begun(self, call: FastCall) -> None:
        """The head of a request has come."""
        call.begin_ns = monotonic_ns()
        if self._verbose:
            log_http_request(_METHOD, call.head.target)

    def responded(self, call: FastCall, response: ResponseBytes) -> None:
        """`response` was handed to the transport."""
        self._write(call, str(response.status), response.byte_size)

    def refused(self, head: HttpRequestHead, response: ResponseBytes) -> None:
        """`response` was handed to the transport for a request that its head alone decided."""
        if self._verbose:
            log_http_request(_METHOD, head.target)
        if not self._access:
            return
        log_http_access(
            self._peer,
            _METHOD,
            head.target,
            str(response.status),
            monotonic_ns(),
            bytes_in=head.content_length,
            bytes_out=response.byte_size,
            request_id="",
        )

    def client_gone(self, call: FastCall) -> None:
        """The client did not wait for the response."""
        self._write(call, CLIENT_GONE, None)

    def _write(self, call: FastCall, status: str, bytes_out: int | None) -> None:
        if not self._access:
            return
        log_http_access(
            self._peer,
            _METHOD,
            call.head.target,
            status,
            call.begin_ns,
            bytes_in=call.head.body_byte_size,
            bytes_out=bytes_out,
            request_id=call.request_id,
        )
