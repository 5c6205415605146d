"""The HTTP front door: Triton's API, on the fast path and through aiohttp."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

import msgspec
from aiohttp import HttpVersion10, HttpVersion11

from kernel.background import BackgroundTasks
from kernel.options import AdminOptions, HttpOptions
from protocols.access import Category, open_port
from protocols.http.bodies import BodyTooSlow, TooManyChunks
from protocols.http.call import DoorSettings, HttpCall, peer_of
from protocols.http.door import HttpDoor
from protocols.http.doors import ToDoors, door_settings, take_back
from protocols.http.endpoints.dashboard import Dashboard, asks_for_page
from protocols.http.endpoints.docs import OpenApi
from protocols.http.fast.connection import FastConnection
from protocols.http.fast.fast_path import FastPath
from protocols.http.inference.generate_call import GenerateIntake
from protocols.http.inference.infer_call import HttpInference
from protocols.http.listener import Refusal
from protocols.http.responses import RESTRICTED, error_response, retry_headers
from protocols.http.route_hints import method_hint, route_hint
from protocols.http.routes import find_endpoint, request_path
from protocols.listening import Arrival, Gate, is_local, local_url
from protocols.status import http_status

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Collection, Iterable

    from kernel.errors import ServingError
    from kernel.server_parts import DoorFigures
    from kernel.serving.interface import KernelInterface
    from protocols.access import KeyReader, OpenPort, Restrictions
    from protocols.frontend import DoorParts, DoorProcesses
    from protocols.http import web

_DEFAULTS = HttpOptions()


def make_door(parts: DoorParts) -> HttpServer:
    """Return the front door. Raises `BadOption`."""
    options = parts.options
    return HttpServer(
        parts.kernel, parts.sock, options.http, log_access=options.log.access, admin=options.admin, keys=parts.keys,
        processes=parts.processes,
    )  # fmt: skip


class HttpServer(HttpDoor[HttpCall]):
    """Serves Triton's HTTP API on a bound socket."""

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
        processes: DoorProcesses | None = None,
    ) -> None:
        """As `HttpDoor`. Without `fast_path` aiohttp serves inference, too: the same responses, in more time.

        `processes` are front doors in processes of their own, which need the fast path and a port without TLS.
        """
        super().__init__("HTTP", kernel, sock, options, log_access=log_access, admin=admin, keys=keys)
        rules = self._rules
        self._administration = open_port("HTTP", sock, options.tls, rules.restrictions)
        inference = HttpInference(kernel, options.max_input_size, forwards=rules.forwarder is not None)
        self._dashboard = Dashboard(kernel)
        self._has_dashboard = options.dashboard
        self._settings = DoorSettings(
            inference,
            GenerateIntake(kernel, options.max_input_size),
            rules,
            OpenApi(kernel, rules.restrictions, local_url(sock, tls=options.tls is not None)),
            self._dashboard,
        )
        self._processes = processes
        #: For connections that come back, as for new ones.
        self._gate = Gate(Refusal)
        self._returning = BackgroundTasks()
        if fast_path:
            self.listener.first = FastPath(inference, rules, log_access=log_access)
        if processes is not None:
            assert self.listener.first is not None, "processes of front doors need the fast path"
            self.listener.first.moves = ToDoors(processes)
            self.listener.arrival = functools.partial(Arrival, processes.give, self._make_connection)
            self._door_settings = door_settings(
                options, rules, loopback_only=is_local(sock.getsockname()), log_access=log_access
            )

    def _make_connection(self) -> FastConnection:
        assert self.listener.first is not None, "the front door has no fast path"
        return FastConnection(self.listener.first)

    def _take_back(self, sock: socket.socket, received: bytes, passes: int) -> None:
        """Serve a connection that a process of a front door gives back."""
        work = take_back(self._make_connection, sock, received, passes, stays=True, gate=self._gate)
        self._returning.start(work)

    @property
    def restrictions(self) -> Restrictions:
        return self._rules.restrictions

    @property
    def administration(self) -> OpenPort:
        return self._administration

    async def start(self) -> None:
        await super().start()
        if self._processes is not None:
            self._processes.open("protocols.http.doors", self._door_settings, self._take_back)
        if self._has_dashboard:
            self._dashboard.start()

    async def stop(self, grace_s: float) -> None:
        self._dashboard.close()
        if self._processes is None:
            await super().stop(grace_s)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().stop(grace_s))
            tasks.create_task(self._processes.drain(grace_s))

    def figures(self) -> DoorFigures:
        figures = super().figures()
        if self._processes is None:
            return figures
        return msgspec.structs.replace(figures, connections=figures.connections + self._processes.connection_count)

    def _begin(
        self, http: web.BaseRequest, headers: dict[str, str]
    ) -> web.Response | tuple[Callable[[HttpCall], Awaitable[web.StreamResponse]], HttpCall]:
        if not _well_framed(http):
            response = error_response(400, "Bad Request", plain=True)
            response.force_close()
            return response
        path = request_path(http.raw_path)
        found = find_endpoint(path, self._kernel.catalog.has_label)
        if found is None or (found[0].dashboard and not (self._has_dashboard and asks_for_page(path, http))):
            return self._not_found(http, path)
        endpoint, names = found
        administers = endpoint.administers and (http.method == "POST" or endpoint.reveals)
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
        return handler, HttpCall(
            http, names, self._settings, plain_errors=endpoint.plain_errors, response_headers=headers
        )

    def _methods(self, http: web.BaseRequest) -> Iterable[str] | None:
        found = find_endpoint(request_path(http.raw_path), self._kernel.catalog.has_label)
        return None if found is None else found[0].handlers

    def _error(
        self, http: web.BaseRequest, call: HttpCall | None, error: ServingError | BodyTooSlow | TooManyChunks
    ) -> web.Response:
        plain = call is not None and call.plain_errors
        if isinstance(error, BodyTooSlow):
            return error_response(408, "Request Timeout", plain=True)
        if isinstance(error, TooManyChunks):
            return error_response(400, str(error), plain=plain)
        headers = retry_headers(error) if call is None else {**call.error_headers, **retry_headers(error)}
        return error_response(http_status(error), error.text, plain=plain, headers=headers)

    def _not_found(self, http: web.BaseRequest, path: str) -> web.Response:
        """Return the response for a path that no route has, with a hint that names models only if the client may."""

        def models() -> Collection[str]:
            if self._rules.refusal("POST", Category.MODEL_REPOSITORY, http.headers.get, peer_of(http)) is not None:
                return ()
            return self._kernel.catalog.ready_names()

        return error_response(404, f"Not Found{route_hint(path, models)}", plain=True)


def _well_framed(http: web.BaseRequest) -> bool:
    """Whether the request is HTTP/1.1, or HTTP/1.0 without what that version cannot frame (RFC 9112, 6.1).

    A body in chunks may have no other transfer coding: the bytes of `gzip, chunked` are not the content.
    """
    codings = http.headers.getall("Transfer-Encoding", None)
    if codings is None:
        return http.version in (HttpVersion10, HttpVersion11)
    return http.version == HttpVersion11 and ",".join(codings).strip().lower() == "chunked"
