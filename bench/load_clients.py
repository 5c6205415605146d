"""The client's side of both protocols, for requests that never change: bytes in, bytes out, nothing decoded twice.

A load client is the state of one connection with at most one request in flight. It checks that every response is a
success. Sockets and time belong to `bench/load.py`.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Protocol

import hpack
import msgspec

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


#: Those of `add_sub` in all its copies.
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
