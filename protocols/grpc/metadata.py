"""Metadata of calls as parameters of their requests (--grpc-header-forward-pattern)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.forwarding import make_forwarder
from protocols.grpc.grpclib_internals import decode_metadata

if TYPE_CHECKING:
    from protocols.forwarding import HeaderForwarder
    from protocols.grpc.h2.headers import RequestHead


class MetadataForwarder:
    """Chooses metadata by its names. Headers of gRPC itself are not metadata, except the user agent."""

    def __init__(self, forwarder: HeaderForwarder) -> None:
        self._forwarder = forwarder

    def of_call(self, request_head: RequestHead) -> dict[str, str]:
        """Return the parameters that the headers of a call, or a stream, become. Raises `ReservedHeader`."""
        user_agent = next((value for name, value in request_head.fields if name == "user-agent"), None)
        headers = [(name, _text(value)) for name, value in decode_metadata(request_head.fields).items()]
        if user_agent is not None:
            headers.append(("user-agent", _text(user_agent)))
        return self._forwarder.parameters(headers)


def make_metadata_forwarder(pattern: str) -> MetadataForwarder | None:
    """Return the forwarder for the value of the flag, None where nothing is forwarded. Raises `BadOption`."""
    forwarder = make_forwarder(pattern)
    return None if forwarder is None else MetadataForwarder(forwarder)


def _text(value: str | bytes) -> str:
    """Return a value, which was decoded as Latin-1, in the form that `HeaderForwarder` expects."""
    octets = value if isinstance(value, bytes) else value.encode("latin-1")
    return octets.decode(errors="surrogateescape")
