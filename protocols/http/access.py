"""Where the HTTP front door meets the access log: aiohttp's own hook behind an answer, and clients that go before it.

Only in use with --log-access; aiohttp answers inference requests then, too, instead of the lane.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from kernel.observe.access import Access, log_access, peer_text
from protocols.http.aiohttp_internals import is_response_begun
from protocols.http.call import REQUEST_ID
from protocols.http.routes import find_endpoint, request_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: When an answer was begun, and the peer: a client that has gone has no address any more. What is no HTTP has none.
_BEGIN = web.RequestKey("begin", tuple)

#: What nginx writes for a client that went away before it had its answer.
_CLIENT_GONE = "499"


class AccessLogger(AbstractAccessLogger):
    """Called by aiohttp when it has sent an answer; `time` is in seconds, and with uvloop in whole milliseconds."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        _log(request, str(response.status), int(time * 1e9), response.body_length)


class WatchedAnswer:
    """Answers as `answer` does, and logs the requests whose clients do not wait for that."""

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        self._answer = answer

    async def __call__(self, http: web.BaseRequest) -> web.StreamResponse:
        http[_BEGIN] = (monotonic_ns(), _peer(http))
        try:
            return await self._answer(http)
        except asyncio.CancelledError:
            _log(http, _CLIENT_GONE, 0, None)
            raise
        except ConnectionError:
            if is_response_begun(http):  # else aiohttp tries to send an error, and calls the logger
                _log(http, _CLIENT_GONE, 0, None)
            raise


def _peer(http: web.BaseRequest) -> str:
    transport = http.transport
    return peer_text(transport.get_extra_info("peername")) if transport is not None else ""


def _log(http: web.BaseRequest, status: str, duration_ns: int, bytes_out: int | None) -> None:
    """Write the line of a request; `duration_ns` is for one that was not seen to begin."""
    found = find_endpoint(request_path(http.raw_path))
    names = found[1] if found is not None else {}
    begin_ns, peer = http.get(_BEGIN) or (monotonic_ns() - duration_ns, _peer(http))
    log_access(
        Access(
            peer=peer,
            method=http.method,
            path=http.raw_path,
            status=status,
            duration_ns=monotonic_ns() - begin_ns,
            bytes_in=http.content_length if http.body_exists else 0,
            bytes_out=bytes_out,
            model=names.get("model", ""),
            version=names.get("version", ""),
            request_id=http.get(REQUEST_ID, ""),
        )
    )
