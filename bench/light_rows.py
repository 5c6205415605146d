"""The rows of load with a light client: a table of what is sent to which model over how many connections.

The rows `onnx_cpp` compare ONNX Runtime here with Triton's C++ ONNX Runtime backend, which runs in its own process. The
other rows run Python models on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.light_cases import BINARY, GENERATE, GRPC, JSON, SHARED, Payload

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Groups of rows, as `bench.rows.PERF_ANALYZER`.
LIGHT, CPP = "light client", "C++ backend"

#: Floats of JSON rows: 330 bytes of text to 5 MB.
JSON_SIZES = (16, 256, 1024, 4096, 16384, 262144)

_MIB = 1 << 20


class LightRow(msgspec.Struct, frozen=True):
    """A load of `connections` x `streams` requests in flight, sent by wrk or h2load."""

    name: str
    payload: Payload
    model: str
    connections: int
    streams: int = 1
    tls: bool = False
    keep_alive: bool = True
    group: str = LIGHT
    #: How many times longer than others the load lasts, where a second has too few responses for a rate.
    longer: int = 1
    #: The model that Triton runs in this row, as in `bench.rows.Row`; empty for the same one.
    triton_model: str = ""

    @property
    def protocol(self) -> str:
        return self.payload.protocol

    @property
    def concurrency(self) -> int:
        return self.connections * self.streams

    @property
    def on_triton(self) -> bool:
        """Whether Triton can serve the row: its HTTP has no TLS."""
        return not (self.tls and self.protocol == "http")


def light_rows() -> list[LightRow]:
    """Return every row with a light client, in the order of the report."""
    small = Payload(BINARY, "add_sub", 16)
    small_grpc = Payload(GRPC, "add_sub", 16)
    table = [
        *_rows("light add_sub binary", small, "add_sub", (1, 8, 32, 256)),
        *_rows("light add_sub json", Payload(JSON, "add_sub", 16), "add_sub", (1, 8, 32)),
        *_rows("light add_sub grpc", small_grpc, "add_sub", (1, 8, 32, 256)),
        LightRow("light add_sub grpc 4x4 streams", small_grpc, "add_sub", 4, streams=4),
        LightRow("light add_sub binary close c=8", small, "add_sub", 8, keep_alive=False),
        LightRow("light add_sub binary tls c=8", small, "add_sub", 8, tls=True),
        LightRow("light add_sub grpc tls c=8", small_grpc, "add_sub", 8, tls=True),
        *_rows("light generate", Payload(GENERATE, "identity", 1, "BYTES"), "identity_bytes", (8,)),
    ]
    for count in JSON_SIZES:
        rows = _rows(f"light json {count} floats", Payload(JSON, "identity", count), "identity", (1, 4))
        table += [msgspec.structs.replace(row, longer=4 if count > 100_000 else 1) for row in rows]
    for datatype, label in (("INT64", "ints"), ("BYTES", "words")):
        for count in (1024, 16384):
            payload = Payload(JSON, "identity", count, datatype)
            table += _rows(f"light json {count} {label}", payload, f"identity_{datatype.lower()}", (1, 4))
    for form in (BINARY, GRPC):
        table += _rows(f"light 1M body {form}", Payload(form, "identity", _MIB // 4), "identity", (1, 4))
    for size, label in ((_MIB, "1M"), (16 * _MIB, "16M")):
        table += _rows(f"light {label} shm http", Payload(SHARED, "identity", size // 4), "identity", (1, 4))
    return [*table, *_cpp_rows()]


def _cpp_rows() -> list[LightRow]:
    table: list[LightRow] = []
    for form in (BINARY, JSON, GRPC):
        table += _rows(f"onnx_cpp add_sub {form}", Payload(form, "add_sub", 16), "add_sub_onnx", (1, 8, 32), CPP)
    table += _rows("onnx_cpp mlp binary", Payload(BINARY, "mlp", 1024), "mlp_onnx", (1, 8, 32), CPP)
    for form in (BINARY, GRPC):
        table += _rows(f"onnx_cpp 1M body {form}", Payload(form, "identity", _MIB // 4), "identity_onnx", (4,), CPP)
    return table + _rows("onnx_cpp json 1024 floats", Payload(JSON, "identity", 1024), "identity_onnx", (4,), CPP)


def _rows(name: str, payload: Payload, model: str, connections: Iterable[int], group: str = LIGHT) -> list[LightRow]:
    return [LightRow(f"{name} c={count}", payload, model, count, group=group) for count in connections]
