"""What the front doors over HTTP have in common, Triton's and OpenAI's: the listener, TLS, logs, CORS, errors.

Every request that aiohttp serves goes through `HttpDoor._respond`, where errors become responses. A door says which
handlers a path has, what a request needs before its handler runs, and how an error is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kernel.errors import ServingError
from kernel.observe.internal_errors import unexpected_error
from kernel.server_parts import DoorFigures
from protocols.frontend import FrontDoor
from protocols.http import web
from protocols.http.access_log import AiohttpAccessLogger, LoggedHandler, log_http_request
from protocols.http.aiohttp_internals import check_not_begun
from protocols.http.bodies import BodyTooSlow, TooManyChunks
from protocols.http.listener import HttpListener
from protocols.http.request_rules import make_request_rules
from protocols.http.responses import SERVER_HEADER
from protocols.listening import is_local

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterable

    from kernel.options import AdminOptions, HttpOptions
    from kernel.serving.interface import KernelInterface
    from protocols.access import KeyReader
    from protocols.tls import Certificates


class DoorCall(Protocol):
    """One request for a handler."""

    #: Headers of every response; a handler adds them itself only where it begins to send.
    response_headers: dict[str, str]


_Call = TypeVar("_Call", bound=DoorCall)


class HttpDoor(FrontDoor, Generic[_Call]):
    """Serves HTTP on a bound socket. `_Call` is what its handlers get."""

    def __init__(
        self,
        name: str,
        kernel: KernelInterface,
        sock: socket.socket,
        options: HttpOptions,
        *,
        log_access: bool,
        admin: AdminOptions | None,
        keys: KeyReader | None,
    ) -> None:
        """The door owns `sock`, which is bound, from `start` on. Raises `BadOption` for what is wrong with `options`.

        `name` is the protocol's, for the log and the metrics. With `log_access` every request gets a line in the access
        log. `keys` reads the keys of restrictions.
        """
        self._name = name
        self._kernel = kernel
        self._rules = make_request_rules(options, loopback_only=is_local(sock.getsockname()), keys=keys, admin=admin)
        self._certificates: Certificates | None = None
        if options.tls is not None:
            from protocols.tls import Certificates  # few servers have any

            self._certificates = Certificates(name, options.tls, ["http/1.1"])
        self._listener = HttpListener(
            sock,
            f"{name}Service",
            LoggedHandler(self._respond) if log_access else self._respond,
            None if self._certificates is None else self._certificates.context,
            AiohttpAccessLogger if log_access else None,
        )

    @property
    def title(self) -> str:
        return self._listener.title

    async def start(self) -> None:
        await self._listener.start()
        if self._certificates is not None:
            self._certificates.start()

    async def stop(self, grace_s: float) -> None:
        if self._certificates is not None:
            self._certificates.stop()
        await self._listener.stop(grace_s)

    def figures(self) -> DoorFigures:
        expires_s = None if self._certificates is None else self._certificates.expiry_s
        return DoorFigures(self._name.lower(), self._listener.connection_count, expires_s)

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        """Return the response to any request, with the headers of CORS if there are some."""
        if self._kernel.log.values.log_verbose_level:
            log_http_request(http.method, http.raw_path)
        headers = self._rules.response_headers(http.headers.get("Origin"))
        call: _Call | None = None
        try:
            begun = self._preflight(http) or self._begin(http, headers)
            response: web.StreamResponse
            if isinstance(begun, web.Response):
                response = begun
            else:
                handler, call = begun
                response = await handler(call)
        except ServingError as error:
            response = self._error(http, call, error)
        except (BodyTooSlow, TooManyChunks) as error:
            response = self._error(http, call, error)
            response.force_close()
        except ConnectionError:
            raise  # the client has disconnected, aiohttp cleans up
        except Exception as error:
            refused = unexpected_error(f"{http.method} {http.raw_path}", error)
            check_not_begun(http)
            response = self._error(http, None, refused)
        if not response.prepared:
            response.headers.update(headers if call is None else call.response_headers)
        return response

    def _begin(
        self, http: web.BaseRequest, headers: dict[str, str]
    ) -> web.Response | tuple[Callable[[_Call], Awaitable[web.StreamResponse]], _Call]:
        """Return the handler of a request and what it gets, or the response to one that is refused by its head.

        `headers` are for a response that the handler begins to send itself. May raise `ServingError`.
        """
        raise NotImplementedError

    def _methods(self, http: web.BaseRequest) -> Iterable[str] | None:
        """Return the methods that the path of a request has; None for a path that does not exist."""
        raise NotImplementedError

    def _error(
        self, http: web.BaseRequest, call: _Call | None, error: ServingError | BodyTooSlow | TooManyChunks
    ) -> web.Response:
        """Return the response to a request that has failed; without `call` before its handler ran, or by a bug."""
        raise NotImplementedError

    def _preflight(self, http: web.BaseRequest) -> web.Response | None:
        """Return the response to a browser that asks whether it may send a request; None if it does not."""
        cors, origin = self._rules.cors, http.headers.get("Origin")
        if cors is None or http.method != "OPTIONS" or origin is None:
            return None
        if "Access-Control-Request-Method" not in http.headers or (methods := self._methods(http)) is None:
            return None
        requested = http.headers.get("Access-Control-Request-Headers")
        headers = cors.preflight_headers(origin, methods, requested)
        return web.Response(status=204, headers={**SERVER_HEADER, **headers})
