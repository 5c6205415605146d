"""The lines of the log for requests that the fast path serves. Only in use with --log-access or --log-verbose=1."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING

from kernel.observe.access import peer_text
from protocols.http.access import CLIENT_GONE, log_http_access, log_http_request

if TYPE_CHECKING:
    import asyncio

    from protocols.http.fast.call import FastCall
    from protocols.http.fast.request_head import HttpRequestHead
    from protocols.http.fast.response_bytes import ResponseBytes

_METHOD = "POST"


class ConnectionAccessLog:
    """Logs the requests of one connection."""

    def __init__(self, transport: asyncio.BaseTransport, *, access: bool, verbose: bool) -> None:
        """With `access` there is a line after each response, with `verbose` one when a request comes."""
        self._access = access
        self._verbose = verbose
        #: A client that has disconnected has no address any more.
        self._peer = peer_text(transport.get_extra_info("peername"))

    def begun(self, call: FastCall) -> None:
        """The head of a request has come."""
        call.begin_ns = monotonic_ns()
        if self._verbose:
            log_http_request(_METHOD, call.head.target)

    def responded(self, call: FastCall, response: ResponseBytes) -> None:
        """`response` was handed to the transport."""
        self._write(call, str(response.status), response.byte_size)

    def refused(self, head: HttpRequestHead, response: ResponseBytes) -> None:
        """`response` was handed to the transport for a request that its head alone decided."""
        if self._verbose:
            log_http_request(_METHOD, head.target)
        if not self._access:
            return
        log_http_access(
            self._peer,
            _METHOD,
            head.target,
            str(response.status),
            monotonic_ns(),
            bytes_in=head.content_length,
            bytes_out=response.byte_size,
            request_id="",
        )

    def client_gone(self, call: FastCall) -> None:
        """The client did not wait for the response."""
        self._write(call, CLIENT_GONE, None)

    def _write(self, call: FastCall, status: str, bytes_out: int | None) -> None:
        if not self._access:
            return
        log_http_access(
            self._peer,
            _METHOD,
            call.head.target,
            status,
            call.begin_ns,
            bytes_in=call.head.body_byte_size,
            bytes_out=bytes_out,
            request_id=call.request_id,
        )
