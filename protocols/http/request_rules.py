"""What the operator's options do with a request by its head alone, on the fast path and in aiohttp.

Restricted APIs refuse requests, header forwarding makes parameters of headers, CORS adds headers to responses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.forwarding import make_forwarder
from protocols.http.cors import CorsPolicy
from protocols.restricted import HTTP, Restrictions, parse_restrictions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.options import HttpOptions
    from protocols.forwarding import ForwardedHeaders, HeaderForwarder
    from protocols.restricted import Category


class RequestRules(msgspec.Struct, frozen=True):
    """The rules of one HTTP server; by default none."""

    restrictions: Restrictions = Restrictions({})
    #: For inference requests only, as in Triton. None where no header is forwarded.
    forwarder: HeaderForwarder | None = None
    #: None where browsers get no headers of CORS.
    cors: CorsPolicy | None = None

    def refusal(self, category: Category, header: Callable[[str], str | bytes | None]) -> str | None:
        """Return the error for a client that lacks the header of `category`; None for a request that is admitted.

        `header` returns the value of a request header by its name in any case of letters, None where it is absent.
        """
        restriction = self.restrictions.of(category)
        if restriction is None or restriction.admits(header(restriction.header)):
            return None
        return restriction.message

    def forwarded(self, headers: Iterable[tuple[bytes, bytes]]) -> ForwardedHeaders | None:
        """Return what becomes of the headers of an inference request, with names and values as they were sent."""
        if self.forwarder is None:
            return None
        return self.forwarder.forward((_text(name), _text(value.strip(b" \t"))) for name, value in headers)

    def response_headers(self, origin: str | None) -> dict[str, str]:
        """Return what every response to a request from `origin` carries; None stands for no `Origin`."""
        return {} if self.cors is None else self.cors.response_headers(origin)


def make_request_rules(options: HttpOptions) -> RequestRules:
    """Return the rules that `options` ask for. Raises `BadOption`."""
    return RequestRules(
        parse_restrictions(options.restricted_api, HTTP),
        make_forwarder(options.header_forward_pattern),
        CorsPolicy(options.cors_origins) if options.cors_origins else None,
    )


def _text(octets: bytes) -> str:
    return octets.decode(errors="surrogateescape")
