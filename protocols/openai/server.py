"""The OpenAI front door: a listener of its own, because `/v1/models` means other things elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.observe.internal_errors import unexpected_error
from kernel.options import AdminOptions, HttpOptions, OpenAiOptions
from kernel.server_parts import DoorFigures
from protocols.access import Category, open_port
from protocols.frontend import FrontDoor
from protocols.http import web
from protocols.http.access_log import AiohttpAccessLogger, LoggedHandler, log_http_request
from protocols.http.aiohttp_internals import check_not_begun
from protocols.http.bodies import BodyTooSlow, TooManyChunks
from protocols.http.call import peer_of
from protocols.http.listener import HttpListener
from protocols.http.request_rules import make_request_rules
from protocols.http.responses import JSON, SERVER_HEADER, retry_headers
from protocols.http.routes import request_path
from protocols.listening import is_local
from protocols.openai.api_keys import ApiKeys
from protocols.openai.call import REQUEST_ID_HEADER, DoorSettings, OpenAiCall, request_id_of
from protocols.openai.errors import ApiError, error_body, status_of
from protocols.openai.generation import GenerationIntake, SilenceWatch
from protocols.openai.routes import find_route

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kernel.serving.interface import KernelInterface
    from protocols.access import KeyReader, OpenPort
    from protocols.forwarding import ForwardedHeaders
    from protocols.frontend import DoorParts
    from protocols.openai.generation import ChoiceCall
    from protocols.openai.routes import OpenAiRoute
    from protocols.tls import Certificates

_DEFAULTS = OpenAiOptions()


def make_door(parts: DoorParts) -> OpenAiServer:
    """Return the front door. Raises `BadOption`."""
    options = parts.options
    return OpenAiServer(
        parts.kernel,
        parts.sock,
        options.openai,
        http=options.http,
        log_access=options.log.access,
        admin=options.admin,
        keys=parts.keys,
    )


class OpenAiServer(FrontDoor):
    """Serves OpenAI's API on a bound socket. A `protocols.frontend.FrontDoor`."""

    def __init__(
        self,
        kernel: KernelInterface,
        sock: socket.socket,
        options: OpenAiOptions = _DEFAULTS,
        *,
        http: HttpOptions | None = None,
        log_access: bool = False,
        admin: AdminOptions | None = None,
        keys: KeyReader | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """The server owns `sock`, which is bound, from `start` on. Raises `BadOption` for what is wrong with options.

        `http` are the options of the HTTP port, of which limits, restrictions, names, origins and TLS hold here, too.
        """
        http = http or HttpOptions()
        self._kernel = kernel
        self._rules = rules = make_request_rules(
            http, loopback_only=is_local(sock.getsockname()), keys=keys, admin=admin
        )

        def forwarded(call: ChoiceCall) -> ForwardedHeaders | None:
            return rules.forwarded(call.head.headers)

        self._intake = GenerationIntake(kernel, None if rules.forwarder is None else forwarded)
        # Models are loaded over it, and nothing else is administered.
        port = open_port("OpenAI's API", sock, http.tls, rules.restrictions)
        self._administration = msgspec.structs.replace(port, categories=frozenset({Category.MODEL_REPOSITORY}))
        self._keys = None if options.api_keys is None else ApiKeys(options.api_keys)
        self.silence = SilenceWatch()
        self._seen: dict[str, int] = {}
        self._door = DoorSettings(
            kernel,
            self._intake,
            self.silence,
            rules,
            http.max_input_size,
            options.default_max_tokens,
            now_s,
            self._created_s,
        )
        self._certificates: Certificates | None = None
        if http.tls is not None:
            from protocols.tls import Certificates  # few servers have any

            self._certificates = Certificates("OpenAI", http.tls, ["http/1.1"])
        self._listener = HttpListener(
            sock,
            "OpenAIService",
            LoggedHandler(self._respond) if log_access else self._respond,
            tls=None if self._certificates is None else self._certificates.context,
            access_logger=AiohttpAccessLogger if log_access else None,
        )

    @property
    def administration(self) -> OpenPort:
        return self._administration

    @property
    def title(self) -> str:
        return self._listener.title

    async def start(self) -> None:
        await self._listener.start()
        if self._keys is not None:
            self._keys.start()
        if self._certificates is not None:
            self._certificates.start()

    async def stop(self, grace_s: float) -> None:
        if self._keys is not None:
            self._keys.stop()
        if self._certificates is not None:
            self._certificates.stop()
        await self._listener.stop(grace_s)

    def figures(self) -> DoorFigures:
        expires_s = None if self._certificates is None else self._certificates.expiry_s
        return DoorFigures("openai", self._listener.connection_count, expires_s)

    def _created_s(self, name: str) -> int:
        """Return when the model was first listed; forgets models that are gone."""
        if name not in self._seen:
            ready = self._kernel.catalog.ready_names()
            self._seen = {each: s for each, s in self._seen.items() if each in ready}
            self._seen[name] = int(self._door.now_s())
        return self._seen[name]

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        """Return the response to any request, with the headers of CORS if there are some."""
        if self._kernel.log.values.log_verbose_level:
            log_http_request(http.method, http.raw_path)
        headers = self._rules.response_headers(http.headers.get("Origin"))
        path = request_path(http.raw_path)
        found = find_route(path)
        response = self._preflight(http, found) or await self._respond_by_route(http, path, found, headers)
        if not response.prepared:
            response.headers.update(headers)
        return response

    async def _respond_by_route(
        self,
        http: web.BaseRequest,
        path: str,
        found: tuple[OpenAiRoute, dict[str, str]] | None,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        try:
            if found is None:
                raise ApiError("Not Found", 404)
            route, names = found
            handler = route.handlers.get(http.method)
            if handler is None:
                raise _NotAllowed(", ".join(route.handlers))
            refusal = self._rules.refusal(
                http.method, route.category, http.headers.get, peer_of(http), administers=route.administers
            )
            if refusal is not None:
                raise ApiError(refusal, 401, code="invalid_auth")
            key = None
            if self._keys is not None and route.category is not Category.HEALTH:
                key = self._keys.find(http.headers.get("Authorization"))
            call = OpenAiCall(http, names, self._door, headers, key)
            response = await handler(call)
            if not response.prepared:
                response.headers[REQUEST_ID_HEADER] = call.request_id
            return response
        except ServingError as error:
            return _error(error, http)
        except BodyTooSlow:
            return _closing(_error(ApiError("Request Timeout", 408), http))
        except TooManyChunks as error:
            return _closing(_error(ApiError(str(error)), http))
        except ConnectionError:
            raise  # the client has disconnected, aiohttp cleans up
        except Exception as error:
            refused = unexpected_error(f"{http.method} {path}", error)
            check_not_begun(http)
            return _error(refused, http)

    def _preflight(
        self, http: web.BaseRequest, found: tuple[OpenAiRoute, dict[str, str]] | None
    ) -> web.Response | None:
        """Return the response to a browser that asks whether it may send a request; None if it does not."""
        cors, origin = self._rules.cors, http.headers.get("Origin")
        if cors is None or http.method != "OPTIONS" or origin is None or found is None:
            return None
        if "Access-Control-Request-Method" not in http.headers:
            return None
        requested = http.headers.get("Access-Control-Request-Headers")
        headers = cors.preflight_headers(origin, found[0].handlers, requested)
        return web.Response(status=204, headers={**SERVER_HEADER, **headers})


class _NotAllowed(ApiError):
    """The method has no handler."""

    def __init__(self, allowed: str) -> None:
        super().__init__("Method Not Allowed", 405)
        self.allowed = allowed


def _error(error: ServingError, http: web.BaseRequest) -> web.Response:
    status = status_of(error)
    headers = {**SERVER_HEADER, **retry_headers(error), REQUEST_ID_HEADER: request_id_of(http)}
    if isinstance(error, _NotAllowed):
        headers["Allow"] = error.allowed
    return web.Response(status=status, body=error_body(error), content_type=JSON, headers=headers)


def _closing(response: web.Response) -> web.Response:
    response.force_close()
    return response
