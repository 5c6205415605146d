"""The HTTP front door: every request of port 8000 goes through `_answer`, the only place that knows errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion10, HttpVersion11, web

from kernel.errors import ServingError
from kernel.options import HttpOptions
from protocols.forwarding import make_forwarder
from protocols.http.access import AccessLogger, WatchedAnswer
from protocols.http.aiohttp_internals import check_unanswered
from protocols.http.body import BodyTooSlow, TooManyChunks
from protocols.http.call import CallSettings, HttpCall
from protocols.http.cors import CorsPolicy
from protocols.http.fast.fast_path import FastPath
from protocols.http.internal_errors import log_bug
from protocols.http.listener import HttpListener
from protocols.http.openapi.endpoint import OpenApi
from protocols.http.responses import SERVER_HEADER, error_reply
from protocols.http.routes import find_endpoint, request_path
from protocols.restricted import HTTP, Category, parse_restrictions
from protocols.status import HTTP_STATUS
from protocols.tls import server_context

if TYPE_CHECKING:
    import socket

    from kernel.serving.kernel import Kernel

_DEFAULTS = HttpOptions()


class HttpServer:
    """Serves Triton's HTTP API on a bound socket. A `protocols.frontend.FrontDoor`."""

    def __init__(
        self,
        kernel: Kernel,
        sock: socket.socket,
        options: HttpOptions = _DEFAULTS,
        *,
        lane: bool = True,
        log_access: bool = False,
    ) -> None:
        """The server owns `sock` from `start` on. Raises `BadOption` for what is wrong with `options`.

        Without `lane` aiohttp answers inference requests, too, only slower. So it does where an option is set
        that concerns every inference request: one restricts them, forwards their headers, or lets browsers in. And
        so it does where every request is logged (`log_access`).
        """
        self._kernel = kernel
        self._restrictions = parse_restrictions(options.restricted_api, HTTP)
        self._cors = CorsPolicy(options.cors_origins) if options.cors_origins else None
        forwarder = make_forwarder(options.header_forward_pattern)
        self._settings = CallSettings(options.max_input_size, OpenApi(kernel, self._restrictions), forwarder)
        plain = (
            self._restrictions.of(Category.INFERENCE) is None
            and forwarder is None
            and self._cors is None
            and not log_access
        )
        self._listener = HttpListener(
            sock,
            "HTTPService",
            WatchedAnswer(self._answer) if log_access else self._answer,
            FastPath(kernel, options.max_input_size) if lane and plain else None,
            server_context(options.tls, ["http/1.1"]) if options.tls is not None else None,
            AccessLogger if log_access else None,
        )

    @property
    def title(self) -> str:
        return self._listener.title

    async def start(self) -> None:
        await self._listener.start()
        self._kernel.connections["http"] = lambda: self._listener.connection_count

    async def stop(self, grace_s: float) -> None:
        await self._listener.stop(grace_s)

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        if self._cors is None:
            return await self._answer_plainly(http, {})
        headers = self._cors.reply_headers(http.headers.get("Origin"))
        reply = _preflight(http, self._cors) or await self._answer_plainly(http, headers)
        if not reply.prepared:
            reply.headers.update(headers)
        return reply

    async def _answer_plainly(self, http: web.BaseRequest, reply_headers: dict[str, str]) -> web.StreamResponse:
        """Answer; `reply_headers` are for a response that a handler begins to send itself."""
        if not _well_framed(http):
            return _closing(error_reply(400, "Bad Request", plain=True))
        found = find_endpoint(request_path(http.raw_path))
        if found is None:
            return error_reply(404, "Not Found", plain=True)
        endpoint, names = found
        restriction = self._restrictions.of(endpoint.category)
        if restriction is not None and not restriction.admits(http.headers.get(restriction.header)):
            return error_reply(403, restriction.message, plain=True)
        handler = endpoint.handlers.get(http.method)
        if handler is None:
            allowed = {"Allow": ", ".join(endpoint.handlers)}
            return error_reply(405, "Method Not Allowed", plain=endpoint.plain_errors, headers=allowed)
        call = HttpCall(http, self._kernel, names, self._settings, plain_errors=endpoint.plain_errors)
        call.reply_headers = reply_headers
        try:
            return await handler(call)
        except ServingError as error:
            return error_reply(
                HTTP_STATUS[error.code], error.message, plain=call.plain_errors, headers=call.error_headers
            )
        except BodyTooSlow:
            return _closing(error_reply(408, "Request Timeout", plain=True))
        except TooManyChunks as error:
            return _closing(error_reply(400, str(error), plain=call.plain_errors))
        except ConnectionError:
            raise  # the client has gone, aiohttp cleans up
        except Exception:
            return _bug(http)


def _preflight(http: web.BaseRequest, cors: CorsPolicy) -> web.Response | None:
    """Return the answer to a browser that asks whether it may send a request; None where it does not."""
    origin = http.headers.get("Origin")
    if http.method != "OPTIONS" or origin is None or "Access-Control-Request-Method" not in http.headers:
        return None
    found = find_endpoint(request_path(http.raw_path))
    if found is None:
        return None
    requested = http.headers.get("Access-Control-Request-Headers")
    headers = cors.preflight_headers(origin, found[0].handlers, requested)
    return web.Response(status=204, headers={**SERVER_HEADER, **headers})


def _bug(http: web.BaseRequest) -> web.StreamResponse:
    """Answer for the exception that is being handled."""
    text = log_bug(f"{http.method} {http.raw_path}")
    check_unanswered(http)
    return error_reply(500, text)


def _well_framed(http: web.BaseRequest) -> bool:
    """Whether the request is HTTP/1.1, or HTTP/1.0 without what that version cannot frame (RFC 9112, 6.1)."""
    return http.version == HttpVersion11 or (http.version == HttpVersion10 and "Transfer-Encoding" not in http.headers)


def _closing(reply: web.Response) -> web.Response:
    reply.force_close()
    return reply
