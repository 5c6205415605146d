"""What a handler gets that aiohttp calls: one HTTP request, and what all requests of a server share.

Triton sends errors of some phases as `text/plain`, although the body is JSON; clients compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, ServingError
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


def identity_of(http: web.BaseRequest) -> str:
    """Return who the client is, for the queue of helpers; empty if it is not known, or has disconnected.

    Asks the system with some calls: for large requests only.
    """
    try:
        return peer_identity(http.transport)
    except ServingError:
        return ""


class DoorSettings(msgspec.Struct, frozen=True):
    """What all requests of a server share."""

    inference: HttpInference
    generation: GenerateIntake
    rules: RequestRules
    openapi: OpenApi
    dashboard: Dashboard


class HttpCall:
    """One request for a handler, which returns the response. `names` are parts of the path, such as the model."""

    __slots__ = (
        "door",
        "error_headers",
        "http",
        "kernel",
        "max_input_size",
        "names",
        "plain_errors",
        "response_headers",
    )

    def __init__(
        self,
        http: web.BaseRequest,
        names: dict[str, str],
        door: DoorSettings,
        *,
        plain_errors: bool,
        response_headers: dict[str, str],
    ) -> None:
        self.http = http
        self.names = names
        self.door = door
        self.kernel = door.inference.kernel
        #: Bytes that JSON, raw input and inflated bodies may have.
        self.max_input_size = door.inference.max_input_size
        #: Whether an error that is raised from now on is sent as `text/plain`.
        self.plain_errors = plain_errors
        #: Headers that an error takes with it.
        self.error_headers: dict[str, str] = {}
        #: Headers of every response; a handler adds them itself only where it begins to send.
        self.response_headers = response_headers

    @property
    def peer(self) -> str:
        return identity_of(self.http)

    def json_too_large(self, byte_size: int) -> ServingError:
        """Return the error for JSON of more than `max_input_size` bytes."""
        return InvalidArgument(
            f"request JSON size of {byte_size} bytes exceeds the maximum allowed input size of "
            f"{self.max_input_size} bytes. Use --http-max-input-size to increase the limit."
        )
