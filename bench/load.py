"""A load of many connections and models from one thread. Each connection always has one request in flight.

perf_analyzer sends requests to one model and uses a thread per connection. Where the number of connections or models
grows, the client itself must not grow. It runs in its own process: `python -m bench.load SPEC` prints a `Sample` as
JSON.

A load client is the state of one connection: bytes in, bytes out, nothing decoded twice. It checks that every response
is a success.
"""

from __future__ import annotations

import gc
import json
import math
import select
import socket
import struct
import subprocess
import sys
import time
from array import array
from typing import Protocol

import hpack
import msgspec

from bench.machine import children_of, cpu_times_of
from protocols.grpc.generated import grpc_service_pb2 as pb


class Inputs(msgspec.Struct, frozen=True):
    """The inputs of every request of a load: tensors of 32-bit floats with the same shape."""

    names: tuple[str, ...] = ("INPUT0", "INPUT1")
    shape: tuple[int, ...] = (16,)

    @property
    def data(self) -> bytes:
        """The bytes of each input: 0, 1, 2 and so on."""
        count = math.prod(self.shape)
        return struct.pack(f"<{count}f", *range(count))


#: The inputs of `add_sub` in all its copies.
ADD_SUB = Inputs()


class BadResponse(Exception):
    """The response is an error, or breaks the protocol."""


class LoadClient(Protocol):
    """One connection's state."""

    #: Bytes to send before the next request: the connection preface and acknowledgements. The caller sends and clears
    #: them.
    pending: bytearray

    def request(self, model: str) -> bytes:
        """Return the bytes of a request. Its response must be complete before the next one is sent."""
        ...

    def feed(self, received: bytes) -> bool:
        """Take received bytes. Returns whether they complete the response. Raises `BadResponse`."""
        ...


class HttpLoadClient:
    """HTTP/1.1 with keep-alive and the binary tensor extension."""

    def __init__(self, inputs: Inputs = ADD_SUB) -> None:
        self.pending = bytearray()
        self._inputs = inputs
        self._buffer = bytearray()
        self._requests: dict[str, bytes] = {}

    def request(self, model: str) -> bytes:
        if model not in self._requests:
            self._requests[model] = _http_request(model, self._inputs)
        return self._requests[model]

    def feed(self, received: bytes) -> bool:
        self._buffer += received
        end_of_head = self._buffer.find(b"\r\n\r\n")
        if end_of_head < 0:
            return False
        head = bytes(self._buffer[:end_of_head]).lower()
        if not head.startswith(b"http/1.1 200 "):
            raise BadResponse(bytes(self._buffer).decode(errors="replace"))
        length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        if len(self._buffer) < end_of_head + 4 + length:
            return False
        self._buffer.clear()
        return True


def _http_request(model: str, inputs: Inputs) -> bytes:
    data = inputs.data
    tensors = [
        {"name": name, "shape": inputs.shape, "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
        for name in inputs.names
    ]
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    body = head + data * len(inputs.names)
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8

END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4

#: Our receive window is so large that no run uses it up (a thousand responses take 200 kB).
WINDOW = (1 << 31) - 1

CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class GrpcLoadClient:
    """gRPC's unary ModelInfer over HTTP/2.

    Neither side uses HPACK's dynamic table. So equal headers are equal bytes, and each header block is decoded once.
    """

    def __init__(self, inputs: Inputs = ADD_SUB) -> None:
        self._inputs = inputs
        settings = struct.pack(">HIHI", 0x1, 0, 0x2, 0)  # HEADER_TABLE_SIZE 0, ENABLE_PUSH 0
        window = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - 65535))
        self.pending = bytearray(CLIENT_PREFACE + frame(SETTINGS, 0, 0, settings) + window)
        self._buffer = bytearray()
        self._stream = -1
        self._window = 65535
        self._decoder = hpack.Decoder()
        self._statuses: dict[bytes, str] = {}
        self._requests: dict[str, tuple[bytes, bytes]] = {}

    def request(self, model: str) -> bytes:
        if model not in self._requests:
            self._requests[model] = _grpc_request(model, self._inputs)
        headers, message = self._requests[model]
        self._stream += 2
        self._window -= len(message)
        if self._window < 0:
            raise BadResponse("the server has not enlarged the connection window")
        return frame(HEADERS, END_HEADERS, self._stream, headers) + frame(DATA, END_STREAM, self._stream, message)

    def feed(self, received: bytes) -> bool:
        buffer = self._buffer
        buffer += received
        position, complete = 0, False
        while len(buffer) - position >= 9:
            length = int.from_bytes(buffer[position : position + 3])
            end = position + 9 + length
            if len(buffer) < end:
                break
            kind, flags, stream = struct.unpack_from(">BBI", buffer, position + 3)
            complete |= self._take(kind, flags, stream, bytes(buffer[position + 9 : end]))
            position = end
        del buffer[:position]
        return complete

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bool:
        if kind == HEADERS:
            return self._take_headers(flags, payload)
        if kind == WINDOW_UPDATE:
            self._window += 0 if stream else int.from_bytes(payload)  # one request never fills a stream's window
        elif kind == SETTINGS and not flags & ACK:
            self.pending += frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self.pending += frame(PING, ACK, 0, payload)
        elif kind in (RST_STREAM, GOAWAY):
            raise BadResponse(f"the server sent a frame of type {kind}: {payload!r}")
        return False

    def _take_headers(self, flags: int, block: bytes) -> bool:
        if block not in self._statuses:
            self._statuses[block] = _grpc_status(self._decoder, block)
        if not flags & END_STREAM:
            return False
        if self._statuses[block] != "0":
            raise BadResponse(f"grpc-status {self._statuses[block]}")
        return True


def _grpc_status(decoder: hpack.Decoder, block: bytes) -> str:
    headers = {str(name): str(value) for name, value in (each[:2] for each in decoder.decode(block))}
    return " ".join(filter(None, (headers.get("grpc-status"), headers.get("grpc-message"))))


def _grpc_request(model: str, inputs: Inputs) -> tuple[bytes, bytes]:
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[inputs.data] * len(inputs.names))
    for name in inputs.names:
        message.inputs.add(name=name, datatype="FP32", shape=inputs.shape)
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    headers = encoder.encode([
        (":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer"),
        (":authority", "localhost"), ("te", "trailers"), ("content-type", "application/grpc"),
    ])  # fmt: skip
    encoded = message.SerializeToString()
    return headers, b"\0" + struct.pack(">I", len(encoded)) + encoded


LOAD_CLIENTS: dict[str, type[HttpLoadClient] | type[GrpcLoadClient]] = {"http": HttpLoadClient, "grpc": GrpcLoadClient}

#: The load ends with an error when a response takes longer.
RESPONSE_TIMEOUT_S = 10.0

#: The warm-up, which is not counted: its shortest time, and the smallest number of requests to each model. Time alone
#: is not enough: models that Triton had just loaded served their first twenty requests at a tenth of the later rate
#: (64 models: 485 requests/s, and 5,400 ten seconds later).
WARM_UP_S, WARM_UP_REQUESTS = 0.3, 100

#: The longest time of the warm-up.
WARM_UP_LIMIT_S = 60.0


class Spec(msgspec.Struct, frozen=True):
    """A load: connections to a port on loopback, which send requests to the models in turn for `seconds`."""

    protocol: str
    port: int
    connections: int
    models: list[str]
    seconds: float
    #: The server's main process. Its CPU time and its descendants' are counted separately.
    server_pid: int
    inputs: Inputs = ADD_SUB


class Sample(msgspec.Struct, frozen=True):
    """The result of a load. CPU times are microseconds per request, of the main process and of its descendants."""

    rate: float
    p50_us: float
    p99_us: float
    requests: int
    server_cpu_us: float
    worker_cpu_us: float


class LoadNotRun(Exception):
    """The load could not be run; the message says why."""


class LoadConnection:
    """A socket, its protocol state, and when its last request was sent."""

    def __init__(self, spec: Spec, number: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", spec.port), timeout=RESPONSE_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client: LoadClient = LOAD_CLIENTS[spec.protocol](spec.inputs)
        self._models = spec.models
        self._next = number
        self.sent_at = 0.0

    def send(self) -> None:
        """Send the next request. It is small enough for the socket's buffer."""
        model = self._models[self._next % len(self._models)]
        self._next += 1
        self.client.pending += self.client.request(model)
        self.flush()
        self.sent_at = time.perf_counter()

    def exchange(self) -> None:
        """Send the next request and wait for its response. Raises `BadResponse`, `OSError`."""
        self.send()
        while not self.receive():
            self.flush()

    def flush(self) -> None:
        if self.client.pending:
            self.socket.sendall(self.client.pending)
            self.client.pending.clear()

    def receive(self) -> bool:
        """Read once. Returns whether the response is complete."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise BadResponse("the server closed the connection")
        return self.client.feed(received)


def run(spec: Spec) -> Sample:
    """Run a load in this thread. Raises `BadResponse`, `OSError`."""
    gc.disable()  # a garbage collection in the client would look like a slow server
    poll = select.epoll()
    connections: dict[int, LoadConnection] = {}
    try:
        for number in range(spec.connections):
            connection = LoadConnection(spec, number)
            connections[connection.socket.fileno()] = connection
            poll.register(connection.socket, select.EPOLLIN)
        for connection in connections.values():
            connection.send()
        _drive(poll, connections, WARM_UP_S, WARM_UP_REQUESTS * len(spec.models))
        before = _cpu(spec.server_pid)
        latencies, elapsed_s = _drive(poll, connections, spec.seconds)
        after = _cpu(spec.server_pid)
    finally:
        poll.close()
        for connection in connections.values():
            connection.socket.close()
    used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    count = len(latencies)
    if not count:
        raise BadResponse("no request was completed")
    ordered = sorted(latencies)
    return Sample(
        rate=count / elapsed_s,
        p50_us=ordered[count // 2] * 1e6,
        p99_us=ordered[count * 99 // 100] * 1e6,
        requests=count,
        server_cpu_us=used.pop(spec.server_pid) / count * 1e6,
        worker_cpu_us=sum(used.values()) / count * 1e6,
    )


def _drive(
    poll: select.epoll, connections: dict[int, LoadConnection], seconds: float, requests: int = 0
) -> tuple[array[float], float]:
    """Keep every connection busy for at least `seconds`, and until `requests` have completed.

    Returns their latencies and the elapsed time, in seconds.
    """
    latencies = array("d")
    began = now = time.perf_counter()
    while now - began < seconds or len(latencies) < requests:
        if now - began > seconds + WARM_UP_LIMIT_S:
            raise BadResponse(f"only {len(latencies)} of {requests} requests of the warm-up were completed")
        ready = poll.poll(RESPONSE_TIMEOUT_S)
        if not ready:
            raise BadResponse(f"no response for {RESPONSE_TIMEOUT_S:.0f} s")
        for descriptor, _ in ready:
            connection = connections[descriptor]
            if connection.receive():
                latencies.append(time.perf_counter() - connection.sent_at)
                connection.send()
            else:
                connection.flush()
        now = time.perf_counter()
    return latencies, now - began


def _cpu(pid: int) -> dict[int, float]:
    """Return CPU seconds by process. So a worker that ends during the load (its model is unloaded) changes nothing."""
    return {each: cpu_times_of(each).total_s for each in (pid, *children_of(pid))}


def run_apart(spec: Spec) -> Sample:
    """Run a load in its own process, apart from progress bars. Raises `LoadNotRun`."""
    command = [sys.executable, "-m", "bench.load", msgspec.json.encode(spec).decode()]
    timeout_s = spec.seconds + WARM_UP_S + WARM_UP_LIMIT_S + 2 * RESPONSE_TIMEOUT_S + 10
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise LoadNotRun("the load did not end") from None
    if done.returncode:
        raise LoadNotRun(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return msgspec.json.decode(done.stdout, type=Sample)


def main() -> int:
    """Run the load that the first argument describes."""
    try:
        sample = run(msgspec.json.decode(sys.argv[1], type=Spec))
    except (BadResponse, OSError) as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(sample))
    return 0


if __name__ == "__main__":
    sys.exit(main())
