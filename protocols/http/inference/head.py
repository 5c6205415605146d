"""What the head of an inference request says, found once for all requests that have the same head. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.serving.front_doors.route import ModelRoute
    from protocols.forwarding import ForwardedHeaders


class InferRequestHead(msgspec.Struct, frozen=True):
    """The facts of a head that the request behind it needs. `route` holds until the catalog of models changes."""

    route: ModelRoute
    #: Name and version as the client gave them, and the request target as it was sent.
    model_name: str
    model_version: str
    target: str
    body_byte_size: int
    #: Bytes of the body that are JSON; 0 for a raw request, whose body is a tensor as a whole.
    header_length: int
    #: The content coding of the response.
    encoding: str
    #: Headers that become parameters of the request; None if there are none.
    forwarded: ForwardedHeaders | None = None
    #: All headers as they were sent, names and values.
    headers: tuple[tuple[bytes, bytes], ...] = ()
    #: Lines that the head of every response carries, with their ends (CORS).
    response_headers: bytes = b""
    #: Whether the client wants to know how the request travels (`X-Naiad-Explain`).
    explain: bool = False
    #: Requests whose heads have the same key, and whose JSON is the same except for the id, share a prepared request
    #: and a response template. A text: its hash is computed once.
    prepared_key: str = ""

    def __post_init__(self) -> None:
        parts = (self.model_name, self.model_version, self.encoding, self.response_headers.decode("latin-1"))
        key = "\n".join((*parts, "explained") if self.explain else parts)
        msgspec.structs.force_setattr(self, "prepared_key", key)
