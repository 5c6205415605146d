"""The OpenAI front door: a listener of its own, because `/v1/models` means other things elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kernel.options import AdminOptions, HttpOptions, OpenAiOptions
from kernel.server_parts import GenerationFigures
from protocols.access import Category, open_port
from protocols.http import web
from protocols.http.bodies import BodyTooSlow, TooManyChunks
from protocols.http.call import peer_of
from protocols.http.door import HttpDoor
from protocols.http.responses import JSON, SERVER_HEADER, retry_headers
from protocols.http.routes import request_path
from protocols.openai.api_keys import ApiKeys
from protocols.openai.call import REQUEST_ID_HEADER, DoorSettings, OpenAiCall, request_id_of
from protocols.openai.errors import ApiError, error_body, status_of
from protocols.openai.generation import GenerationIntake, SilenceWatch
from protocols.openai.meter import GenerationCounts
from protocols.openai.routes import find_route

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterable

    from kernel.errors import ServingError
    from kernel.serving.interface import KernelInterface
    from protocols.access import KeyReader, OpenPort
    from protocols.forwarding import ForwardedHeaders
    from protocols.frontend import DoorParts
    from protocols.openai.generation import ChoiceCall

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


class OpenAiServer(HttpDoor[OpenAiCall]):
    """Serves OpenAI's API on a bound socket."""

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
        """As `HttpDoor`. `http` are the options of the HTTP port, of which limits, restrictions, names, origins and TLS
        hold here, too.
        """
        http = http or HttpOptions()
        super().__init__("OpenAI", kernel, sock, http, log_access=log_access, admin=admin, keys=keys)
        rules = self._rules

        def forwarded(call: ChoiceCall) -> ForwardedHeaders | None:
            return rules.forwarded(call.head.headers)

        # Models are loaded over it, and nothing else is administered.
        port = open_port("OpenAI's API", sock, http.tls, rules.restrictions)
        self._administration = msgspec.structs.replace(port, categories=frozenset({Category.MODEL_REPOSITORY}))
        self._keys = None if options.api_keys is None else ApiKeys(options.api_keys)
        self.silence = SilenceWatch()
        self._seen: dict[str, int] = {}
        self.door = DoorSettings(
            kernel,
            GenerationIntake(kernel, None if rules.forwarder is None else forwarded),
            self.silence,
            rules,
            http.max_input_size,
            options.default_max_tokens,
            now_s,
            self._created_s,
            GenerationCounts(),
        )

    @property
    def administration(self) -> OpenPort:
        return self._administration

    async def start(self) -> None:
        await super().start()
        if self._keys is not None:
            self._keys.watch.start()

    async def stop(self, grace_s: float) -> None:
        if self._keys is not None:
            self._keys.watch.stop()
        await super().stop(grace_s)

    def figures(self) -> GenerationFigures:
        door = super().figures()
        return GenerationFigures(
            door.protocol, door.connections, door.certificate_expiry_s, dict(self.door.counts.by_model)
        )

    def _created_s(self, name: str) -> int:
        """Return when the model was first listed; forgets models that are gone."""
        if name not in self._seen:
            ready = self._kernel.catalog.ready_names()
            self._seen = {each: s for each, s in self._seen.items() if each in ready}
            self._seen[name] = int(self.door.now_s())
        return self._seen[name]

    def _begin(
        self, http: web.BaseRequest, headers: dict[str, str]
    ) -> tuple[Callable[[OpenAiCall], Awaitable[web.StreamResponse]], OpenAiCall]:
        found = find_route(request_path(http.raw_path))
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
        key, use = None, None
        if self._keys is not None and route.category is not Category.HEALTH:
            key = self._keys.find(http.headers.get("Authorization"))
            if route.category is Category.INFERENCE and key.is_limited:
                use = self._keys.use_of(key)
                use.begin(key, time.monotonic_ns())
        return handler, OpenAiCall(http, names, self.door, headers, key, use)

    def _methods(self, http: web.BaseRequest) -> Iterable[str] | None:
        found = find_route(request_path(http.raw_path))
        return None if found is None else found[0].handlers

    def _error(
        self, http: web.BaseRequest, call: OpenAiCall | None, error: ServingError | BodyTooSlow | TooManyChunks
    ) -> web.Response:
        if isinstance(error, BodyTooSlow):
            error = ApiError("Request Timeout", 408)
        elif isinstance(error, TooManyChunks):
            error = ApiError(str(error))
        headers = {**SERVER_HEADER, **retry_headers(error), REQUEST_ID_HEADER: request_id_of(http)}
        if isinstance(error, ApiError) and error.retry_after_s:
            headers["Retry-After"] = str(error.retry_after_s)
        if isinstance(error, _NotAllowed):
            headers["Allow"] = error.allowed
        return web.Response(status=status_of(error), body=error_body(error), content_type=JSON, headers=headers)


class _NotAllowed(ApiError):
    """The method has no handler."""

    def __init__(self, allowed: str) -> None:
        super().__init__("Method Not Allowed", 405)
        self.allowed = allowed
