"""What a handler gets that aiohttp calls: one HTTP request, and what all requests of a server share.

Triton sends errors of some phases as `text/plain`, although the body is JSON; clients compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from protocols.access import peer_identity
from protocols.http import web

if TYPE_CHECKING:
    from protocols.http.endpoints.dashboard import Dashboard
    from protocols.http.endpoints.docs import OpenApi
    from protocols.http.inference.generate_call import GenerateIntake
    from protocols.http.inference.infer_call import HttpInference
    from protocols.http.request_rules import RequestRules


#: Where a handler leaves the id of an inference request, for the access log.
REQUEST_ID = web.RequestKey("request_id", str)


def peer_of(http: web.BaseRequest) -> object:
    """Return the client's address as the transport gives it, None if the client has disconnected."""
    return None if http.transport is None else http.transport.get_extra_info("peername")


class CallSettings(msgspec.Struct, frozen=True):
    """What all calls of a server share."""

    inference: HttpInference
    generation: GenerateIntake
    rules: RequestRules
    openapi: OpenApi
    dashboard: Dashboard


class HttpCall:
    """One request for a handler, which returns the response. `names` are parts of the path, such as the model."""

    __slots__ = (
        "dashboard",
        "error_headers",
        "generation",
        "http",
        "inference",
        "kernel",
        "max_input_size",
        "names",
        "openapi",
        "plain_errors",
        "response_headers",
        "rules",
    )

    def __init__(
        self,
        http: web.BaseRequest,
        names: dict[str, str],
        settings: CallSettings,
        *,
        plain_errors: bool,
        response_headers: dict[str, str],
    ) -> None:
        self.http = http
        self.names = names
        self.inference = settings.inference
        self.generation = settings.generation
        self.kernel = settings.inference.kernel
        #: Bytes that JSON, raw input and inflated bodies may have.
        self.max_input_size = settings.inference.max_input_size
        self.rules = settings.rules
        self.openapi = settings.openapi
        self.dashboard = settings.dashboard
        #: Whether an error that is raised from now on is sent as `text/plain`.
        self.plain_errors = plain_errors
        #: Headers that an error takes with it.
        self.error_headers: dict[str, str] = {}
        #: Headers of every response; a handler adds them itself only where it begins to send.
        self.response_headers = response_headers

    @property
    def peer(self) -> str:
        """Who the client is, for the queue of helpers; empty if it is not known, or has disconnected.

        Asks the system with some calls: for large requests only.
        """
        try:
            return peer_identity(self.http.transport)
        except ServingError:
            return ""
