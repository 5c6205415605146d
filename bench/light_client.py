"""The light client of all rows: it checks a server's response, warms the model up, and runs the load of a row.

A fast wrong answer must not count, and wrk and h2load do not look: so one request at a time is sent before a load, with
a look at every response. The client owns the tensors in shared memory of the rows that have some, which it registers
with a server before each load.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import msgspec

from bench.light import LightLoad, LightRequest, run_load
from bench.light_rows import SHARED, LightCase, build_case, compared, region_names, wrong_outputs

if TYPE_CHECKING:
    from types import TracebackType

    from bench.light_rows import LightRow
    from bench.rows import Figures

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


_SHARED_MEMORY = Path("/dev/shm")


class LightClient:
    """Runs rows with wrk and h2load. Leave the `with` block to remove its shared memory."""

    def __init__(self, seconds: int = 1) -> None:
        """`seconds` is the length of each load; wrk knows whole seconds only."""
        self.seconds = seconds
        self.files: dict[str, Path] = {}

    def __enter__(self) -> LightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self.files.values():
            path.unlink(missing_ok=True)
        self.files.clear()

    def prepare(self, row: LightRow, model: str, ports: dict[str, int]) -> LightLoad | str:
        """Check one response of a server and warm the model up. Returns the load, or what is wrong with the server.

        `ports` are the server's by protocol; TLS is spoken on them if the row has it.
        """
        case = build_case(row.payload, model)
        port = ports[row.protocol]
        try:
            with CheckClient(row.protocol, port, tls=row.tls) as client:
                if row.payload.form == SHARED:
                    self._register(case, client)
                response = client.exchange(case.request)
                wrong = (
                    compared(case, {"OUTPUT0": self._file(region_names(row.payload)[1]).read_bytes()})
                    if row.payload.form == SHARED
                    else wrong_outputs(case, response.headers, response.body)
                )
                if wrong:
                    return wrong
                client.warm_up(case.request)
        except (BadAnswer, OSError) as error:
            return str(error)
        return LightLoad(
            row.protocol, port, case.request, row.connections, row.streams, self.seconds * row.longer, row.tls,
            row.keep_alive, len(response.body),
        )  # fmt: skip

    def measure(self, load: LightLoad) -> Figures | str:
        """Run a load that `prepare` has returned. Returns its figures, or the reason why there are none."""
        return run_load(load)

    def _register(self, case: LightCase, client: CheckClient) -> None:
        """Fill the input's region, empty the output's, and register both. Raises `BadAnswer`, `OSError`."""
        [tensor] = case.inputs.values()
        for name, content in zip(region_names(case.payload), (tensor.tobytes(), bytes(tensor.nbytes)), strict=True):
            path = self._file(name)
            with path.open("r+b" if path.exists() else "wb") as file:  # a server may have mapped the file already
                file.write(content)
            base = f"/v2/systemsharedmemory/region/{name}"
            with contextlib.suppress(BadAnswer):  # it is not registered yet
                client.exchange(LightRequest(f"{base}/unregister", b""))
            settings = {"key": f"/{path.name}", "offset": 0, "byte_size": tensor.nbytes}
            client.exchange(LightRequest(f"{base}/register", msgspec.json.encode(settings)))

    def _file(self, region: str) -> Path:
        return self.files.setdefault(region, _SHARED_MEMORY / f"{region}_{os.getpid()}")
