"""One request at a time, with a look at every response: whether it is right, and the warm-up of a model.

A fast wrong answer must not count, and wrk and h2load do not look.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import msgspec

if TYPE_CHECKING:
    from types import TracebackType

    from bench.light import LightRequest

#: How long a model is warmed up after its first, checked response: helpers start, caches fill.
WARM_UP_S = 0.15
#: The longest wait for a byte of a response.
_TIMEOUT_S = 20.0


class CheckedResponse(msgspec.Struct, frozen=True):
    """A response: headers (and trailers) in lower case, and the whole body."""

    headers: dict[str, str]
    body: bytes


class BadAnswer(Exception):
    """A response that is an error, or none; the message says which."""


class CheckClient:
    """A connection to a port of loopback for requests that follow one another. A `with` block closes it.

    `exchange` raises `BadAnswer`. A certificate is not verified: the server's own is made for the run.
    """

    def __init__(self, protocol: str, port: int, *, tls: bool = False) -> None:
        self._connection = _Http(port, tls=tls) if protocol == "http" else _Grpc(port, tls=tls)

    def __enter__(self) -> CheckClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def exchange(self, request: LightRequest) -> CheckedResponse:
        """Send a request and return its response, which is a success. Raises `BadAnswer`."""
        try:
            return self._connection.exchange(request)
        except (OSError, http.client.HTTPException, h2.exceptions.H2Error) as error:
            raise BadAnswer(f"no response: {error!r}") from error

    def warm_up(self, request: LightRequest) -> None:
        """Send a request again and again for `WARM_UP_S`. Raises `BadAnswer`."""
        end = time.monotonic() + WARM_UP_S
        while time.monotonic() < end:
            self.exchange(request)


class _Http:
    def __init__(self, port: int, *, tls: bool) -> None:
        self._connection = (
            http.client.HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=_context(""))
            if tls
            else http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        )

    def exchange(self, request: LightRequest) -> CheckedResponse:
        self._connection.request("POST", request.path, request.body, request.headers)
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise BadAnswer(f"status {response.status}: {body[:200].decode(errors='replace')}")
        return CheckedResponse({name.lower(): value for name, value in response.getheaders()}, body)

    def close(self) -> None:
        self._connection.close()


class _Grpc:
    def __init__(self, port: int, *, tls: bool) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        if tls:
            self._socket = _context("h2").wrap_socket(self._socket)
        self._scheme = f"http{'s' * tls}"
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._connection.initiate_connection()
        self._socket.sendall(self._connection.data_to_send())

    def exchange(self, request: LightRequest) -> CheckedResponse:
        connection = self._connection
        stream = connection.get_next_available_stream_id()
        connection.send_headers(stream, [
            (":method", "POST"), (":scheme", self._scheme), (":path", request.path), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"), *request.headers.items(),
        ])  # fmt: skip
        unsent = memoryview(request.body)
        headers: dict[str, str] = {}
        body = bytearray()
        while True:
            while len(unsent) and (room := self._room(stream)):
                connection.send_data(stream, unsent[:room].tobytes(), end_stream=len(unsent) <= room)
                unsent = unsent[room:]
            self._socket.sendall(connection.data_to_send())
            for event in self._receive():
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    headers |= dict(event.headers or [])  # type: ignore[arg-type]
                elif isinstance(event, h2.events.DataReceived):
                    body += event.data or b""
                    connection.acknowledge_received_data(event.flow_controlled_length or 0, stream)
                elif isinstance(event, h2.events.StreamEnded):
                    self._socket.sendall(connection.data_to_send())
                    return _success(headers, bytes(body))
                elif isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                    raise BadAnswer(f"the server has reset the stream: {event}")

    def _room(self, stream: int) -> int:
        return min(self._connection.local_flow_control_window(stream), self._connection.max_outbound_frame_size)

    def _receive(self) -> list[h2.events.Event]:
        received = self._socket.recv(1 << 16)
        if not received:
            raise BadAnswer("the server closed the connection")
        return self._connection.receive_data(received)

    def close(self) -> None:
        self._socket.close()


def _success(headers: dict[str, str], body: bytes) -> CheckedResponse:
    if headers.get("grpc-status") != "0":
        raise BadAnswer(f"grpc-status {headers.get('grpc-status')}: {headers.get('grpc-message', '')}")
    return CheckedResponse(headers, body)


def _context(protocol: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocol:
        context.set_alpn_protocols([protocol])
    return context
