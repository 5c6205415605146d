"""Metadata of calls as parameters of their requests (--grpc-header-forward-pattern)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.forwarding import make_forwarder
from protocols.grpc.grpclib_internals import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from grpclib.server import Stream

    from protocols.forwarding import HeaderForwarder
    from protocols.grpc.h2.headers import RequestHead


class MetadataForwarder:
    """Chooses metadata by its names. Headers of gRPC itself are not metadata, except the user agent."""

    def __init__(self, forwarder: HeaderForwarder) -> None:
        self._forwarder = forwarder

    def of_call(self, request_head: RequestHead) -> dict[str, str]:
        """Return the parameters that the headers of a call become. Raises `ReservedHeader`."""
        user_agent = next((value for name, value in request_head.fields if name == "user-agent"), None)
        return self._parameters(decode_metadata(request_head.fields).items(), user_agent)

    def of_stream(self, stream: Stream[Any, Any]) -> dict[str, str]:
        """Return the parameters for every request of a stream. Raises `ReservedHeader`."""
        assert stream.metadata is not None, "grpclib sets it before the call begins"
        return self._parameters(stream.metadata.items(), stream.user_agent)

    def _parameters(self, metadata: Iterable[tuple[str, str | bytes]], user_agent: str | None) -> dict[str, str]:
        headers = [(name, _text(value)) for name, value in metadata]
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
