"""The HTTP front door: every request that aiohttp serves goes through `_respond`, where errors become responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion10, HttpVersion11

from kernel.errors import ServingError
from kernel.observe.internal_errors import unexpected_error
from kernel.options import AdminOptions, HttpOptions
from kernel.server_parts import DoorFigures
from protocols.access import Category, open_port
from protocols.frontend import FrontDoor
from protocols.http import web
from protocols.http.access_log import AiohttpAccessLogger, LoggedHandler, log_http_request
from protocols.http.aiohttp_internals import check_not_begun
from protocols.http.bodies import BodyTooSlow, TooManyChunks
from protocols.http.call import CallSettings, HttpCall, peer_of
from protocols.http.endpoints.dashboard import Dashboard, asks_for_page
from protocols.http.endpoints.docs import OpenApi
from protocols.http.fast.fast_path import FastPath
from protocols.http.inference.generate_call import GenerateIntake
from protocols.http.inference.infer_call import HttpInference
from protocols.http.listener import HttpListener
from protocols.http.request_rules import make_request_rules
from protocols.http.responses import RESTRICTED, SERVER_HEADER, error_response, retry_headers
from protocols.http.route_hints import method_hint, route_hint
from protocols.http.routes import find_endpoint, request_path
from protocols.listening import is_local, local_url
from protocols.status import HTTP_STATUS, http_status

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection

    from kernel.serving.interface import KernelInterface
    from protocols.access import KeyReader, OpenPort, Restrictions
    from protocols.frontend import DoorParts
    from protocols.tls import Certificates

_DEFAULTS = HttpOptions()


def make_door(parts: DoorParts) -> HttpServer:
    """Return the front door. Raises `BadOption`."""
    options = parts.options
    return HttpServer(
        parts.kernel, parts.sock, options.http, log_access=options.log.access, admin=options.admin, keys=parts.keys
    )


class HttpServer(FrontDoor):
    """Serves Triton's HTTP API on a bound socket. A `protocols.frontend.FrontDoor`."""

    def __init__(
        self,
        kernel: KernelInterface,
        sock: socket.socket,
        options: HttpOptions = _DEFAULTS,
        *,
        fast_path: bool = True,
        log_access: bool = False,
        admin: AdminOptions | None = None,
        keys: KeyReader | None = None,
    ) -> None:
        """The server owns `sock`, which is bound, from `start` on. Raises `BadOption` for what is wrong with `options`.

        Without `fast_path` aiohttp serves inference requests, too: with the same responses, in more time.
        With `log_access` every request gets a line in the access log. `keys` reads the keys of restrictions.
        """
        self._kernel = kernel
        self._rules = rules = make_request_rules(
            options, loopback_only=is_local(sock.getsockname()), keys=keys, admin=admin
        )
        self._administration = open_port("HTTP", sock, options.tls, rules.restrictions)
        inference = HttpInference(kernel, options.max_input_size, forwards=rules.forwarder is not None)
        generation = GenerateIntake(kernel, options.max_input_size)
        self._dashboard = Dashboard(kernel)
        self._has_dashboard = options.dashboard
        openapi = OpenApi(kernel, rules.restrictions, local_url(sock, tls=options.tls is not None))
        self._settings = CallSettings(inference, generation, rules, openapi, self._dashboard)
        self._certificates: Certificates | None = None
        if options.tls is not None:
            from protocols.tls import Certificates  # few servers have any

            self._certificates = Certificates("HTTP", options.tls, ["http/1.1"])
        self._listener = HttpListener(
            sock,
            "HTTPService",
            LoggedHandler(self._respond) if log_access else self._respond,
            FastPath(inference, rules, log_access=log_access) if fast_path else None,
            None if self._certificates is None else self._certificates.context,
            AiohttpAccessLogger if log_access else None,
        )

    @property
    def restrictions(self) -> Restrictions:
        return self._rules.restrictions

    @property
    def administration(self) -> OpenPort:
        return self._administration

    @property
    def title(self) -> str:
        return self._listener.title

    async def start(self) -> None:
        await self._listener.start()
        if self._has_dashboard:
            self._dashboard.start()
        if self._certificates is not None:
            self._certificates.start()

    async def stop(self, grace_s: float) -> None:
        self._dashboard.close()
        if self._certificates is not None:
            self._certificates.stop()
        await self._listener.stop(grace_s)

    def figures(self) -> DoorFigures:
        expires_s = None if self._certificates is None else self._certificates.expiry_s
        return DoorFigures("http", self._listener.connection_count, expires_s)

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        """Return the response to any request, with the headers of CORS if there are some."""
        if self._kernel.log.values.log_verbose_level:
            log_http_request(http.method, http.raw_path)
        headers = self._rules.response_headers(http.headers.get("Origin"))
        response = self._preflight(http) or await self._respond_by_route(http, headers)
        if not response.prepared:
            response.headers.update(headers)
        return response

    async def _respond_by_route(self, http: web.BaseRequest, response_headers: dict[str, str]) -> web.StreamResponse:
        """Return the response; `response_headers` are for one that a handler begins to send itself."""
        if not _well_framed(http):
            return _closing(error_response(400, "Bad Request", plain=True))
        path = request_path(http.raw_path)
        found = find_endpoint(path, self._kernel.catalog.has_label)
        if found is None or (found[0].dashboard and not (self._has_dashboard and asks_for_page(path, http))):
            return self._not_found(http, path)
        endpoint, names = found
        administers = endpoint.administers and http.method == "POST"
        refusal = self._rules.refusal(
            http.method, endpoint.category, http.headers.get, peer_of(http), administers=administers
        )
        if refusal is not None:
            return error_response(RESTRICTED, refusal, plain=True)
        handler = endpoint.handlers.get(http.method)
        if handler is None:
            allowed = {"Allow": ", ".join(endpoint.handlers)}
            text = f"Method Not Allowed{method_hint(path, http.method, endpoint.handlers)}"
            return error_response(405, text, plain=endpoint.plain_errors, headers=allowed)
        call = HttpCall(
            http, names, self._settings, plain_errors=endpoint.plain_errors, response_headers=response_headers
        )
        try:
            return await handler(call)
        except ServingError as error:
            return _error(error, call)
        except BodyTooSlow:
            return _closing(error_response(408, "Request Timeout", plain=True))
        except TooManyChunks as error:
            return _closing(error_response(400, str(error), plain=call.plain_errors))
        except ConnectionError:
            raise  # the client has disconnected, aiohttp cleans up
        except Exception as error:
            refused = unexpected_error(f"{http.method} {http.raw_path}", error)
            check_not_begun(http)
            return error_response(HTTP_STATUS[refused.code], refused.text)

    def _not_found(self, http: web.BaseRequest, path: str) -> web.Response:
        """Return the response for a path that no route has, with a hint that names models only if the client may."""

        def models() -> Collection[str]:
            if self._rules.refusal("POST", Category.MODEL_REPOSITORY, http.headers.get, peer_of(http)) is not None:
                return ()
            return self._kernel.catalog.ready_names()

        return error_response(404, f"Not Found{route_hint(path, models)}", plain=True)

    def _preflight(self, http: web.BaseRequest) -> web.Response | None:
        """Return the response to a browser that asks whether it may send a request; None if it does not."""
        cors, origin = self._rules.cors, http.headers.get("Origin")
        if cors is None or http.method != "OPTIONS" or origin is None:
            return None
        if "Access-Control-Request-Method" not in http.headers:
            return None
        found = find_endpoint(request_path(http.raw_path), self._kernel.catalog.has_label)
        if found is None:
            return None
        requested = http.headers.get("Access-Control-Request-Headers")
        headers = cors.preflight_headers(origin, found[0].handlers, requested)
        return web.Response(status=204, headers={**SERVER_HEADER, **headers})


def _error(error: ServingError, call: HttpCall) -> web.Response:
    headers = {**call.error_headers, **retry_headers(error)}
    return error_response(http_status(error), error.text, plain=call.plain_errors, headers=headers)


def _well_framed(http: web.BaseRequest) -> bool:
    """Whether the request is HTTP/1.1, or HTTP/1.0 without what that version cannot frame (RFC 9112, 6.1).

    A body in chunks may have no other transfer coding: the bytes of `gzip, chunked` are not the content.
    """
    codings = http.headers.getall("Transfer-Encoding", None)
    if codings is None:
        return http.version in (HttpVersion10, HttpVersion11)
    return http.version == HttpVersion11 and ",".join(codings).strip().lower() == "chunked"


def _closing(response: web.Response) -> web.Response:
    response.force_close()
    return response
