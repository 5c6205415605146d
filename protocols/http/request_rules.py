"""Applies the operator's options to the head of a request: on the fast path, in aiohttp, and for metrics.

Restricted APIs and the rules for browsers refuse requests, header forwarding makes parameters of headers, CORS adds
headers to responses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.access import HTTP, KeyReader, Restrictions, parse_restrictions
from protocols.forwarding import make_forwarder
from protocols.http.browsers import BrowserRules, CorsPolicy, HostNames, parse_host_names
from protocols.listening import machine_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.options import AdminOptions, HttpOptions
    from protocols.access import Category, Header
    from protocols.forwarding import ForwardedHeaders, HeaderForwarder


class RequestRules(msgspec.Struct, frozen=True):
    """The rules of one HTTP server; by default none."""

    restrictions: Restrictions = Restrictions({})
    #: For inference requests only, as in Triton. None if no header is forwarded.
    forwarder: HeaderForwarder | None = None
    #: None where browsers get no headers of CORS.
    cors: CorsPolicy | None = None
    browsers: BrowserRules = BrowserRules()

    def refusal(
        self, method: str, category: Category, header: Header, peer: object = None, *, administers: bool = False
    ) -> str | None:
        """Return the error for a request that is refused by its head, None for one that is admitted.

        `peer`, the client's address, and `administers` are as for `Restrictions.refusal`.
        """
        refusal = self.restrictions.refusal(category, header, peer, administers=administers)
        return refusal or self.browsers.refusal(method, header)

    def forwarded(self, headers: Iterable[tuple[bytes, bytes]]) -> ForwardedHeaders | None:
        """Return what becomes of the headers of an inference request, with names and values as they were sent.

        Spaces behind a value reach the model, as in Triton; aiohttp removes them from requests that it receives.
        """
        if self.forwarder is None:
            return None
        return self.forwarder.forward((_text(name), _text(value.lstrip(b" \t"))) for name, value in headers)

    def response_headers(self, origin: str | None) -> dict[str, str]:
        """Return what every response to a request from `origin` carries; None stands for no `Origin`."""
        return {} if self.cors is None else self.cors.response_headers(origin)


def make_request_rules(
    options: HttpOptions,
    *,
    loopback_only: bool = False,
    keys: KeyReader | None = None,
    admin: AdminOptions | None = None,
) -> RequestRules:
    """Return the rules that `options` and `admin` ask for. Raises `BadOption`.

    `loopback_only` says whether only programs on this machine reach the port; `keys` reads the keys of restrictions.
    """
    cors = CorsPolicy(options.cors_origins) if options.cors_origins else None
    names = HostNames(machine_names(), parse_host_names(options.allowed_hosts), loopback_only)
    return RequestRules(
        parse_restrictions(options.restricted_api, HTTP, keys or KeyReader(), admin),
        make_forwarder(options.header_forward_pattern),
        cors,
        BrowserRules(names, cors),
    )


def _text(octets: bytes) -> str:
    return octets.decode(errors="surrogateescape")
