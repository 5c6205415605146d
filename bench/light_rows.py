"""The rows of load with a light client: a table of what is sent to which model over how many connections.

The rows `onnx_cpp` compare ONNX Runtime here with Triton's C++ ONNX Runtime backend, which runs in its own process. The
other rows run Python models on both sides.

Requests have random tensors from a seed, and the outputs that a right response has are known. A case is built once; its
request then never changes. Tensors are in JSON, in binary behind the JSON header, in a gRPC message, in shared memory,
or members of a body of `/generate`.
"""

from __future__ import annotations

import functools
import json
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from bench.light import MODEL_INFER, LightRequest
from bench.models import mlp_output
from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

JSON, BINARY, GRPC, SHARED, GENERATE = "json", "binary", "grpc", "shared", "generate"

#: The regions of shared memory that a case of this many bytes uses, by the size of a tensor.
REGIONS = ("naiad_bench_in_{}", "naiad_bench_out_{}")

_WORD_LENGTHS = (3, 10)


class Payload(msgspec.Struct, frozen=True):
    """What a request carries: the model, how its tensors are sent, their datatype and elements.

    `model` names the calculation; the server's model may have another name.
    """

    form: str
    model: str
    count: int
    datatype: str = "FP32"

    @property
    def protocol(self) -> str:
        return GRPC if self.form == GRPC else "http"

    @property
    def byte_size(self) -> int:
        """Bytes of an input of numbers of fixed size."""
        return self.count * (8 if self.datatype == "INT64" else 4)


class LightCase(msgspec.Struct, frozen=True):
    """A request, and its tensors by name."""

    payload: Payload
    request: LightRequest
    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]]


@functools.lru_cache(maxsize=2)  # rows follow one another; a large one has 6 MB of text
def build_case(payload: Payload, model: str) -> LightCase:
    """Return the case of a payload for the server's `model`."""
    inputs, outputs = _tensors(payload)
    make = {JSON: _json, BINARY: _binary, GRPC: _grpc, SHARED: _shared, GENERATE: _generate}[payload.form]
    return LightCase(payload, make(payload, model, inputs), inputs, outputs)


def _tensors(payload: Payload) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return the inputs and the outputs that follow from them."""
    generator = np.random.default_rng(0)
    match payload.model:
        case "add_sub":
            a, b = (_values(generator, payload, (payload.count,)) for _ in range(2))
            return {"INPUT0": a, "INPUT1": b}, {"OUTPUT0": a + b, "OUTPUT1": a - b}
        case "mlp":
            a = _values(generator, payload, (1, payload.count))
            return {"INPUT0": a}, {"OUTPUT0": mlp_output(a)}
        case "identity":
            a = _values(generator, payload, (1, payload.count))
            return {"INPUT0": a}, {"OUTPUT0": a}
        case _:
            raise ValueError(f"no calculation is known for '{payload.model}'")


def _values(generator: np.random.Generator, payload: Payload, shape: tuple[int, ...]) -> NDArray[Any]:
    match payload.datatype:
        case "FP32":
            return generator.standard_normal(shape).astype(np.float32)
        case "INT64":
            return generator.integers(-(10**9), 10**9, shape, np.int64)
        case "BYTES":
            lengths = generator.integers(*_WORD_LENGTHS, payload.count)
            words = ["".join(map(chr, generator.integers(ord("a"), ord("z") + 1, length))) for length in lengths]
            return np.array(words, object).reshape(shape)
        case _:
            raise ValueError(f"no values are known for {payload.datatype}")


def _json(payload: Payload, model: str, inputs: dict[str, NDArray[Any]]) -> LightRequest:
    body = {
        "inputs": [_described(name, each, payload) | {"data": each.ravel().tolist()} for name, each in inputs.items()]
    }
    return LightRequest(_infer_path(model), json.dumps(body).encode(), {"Content-Type": "application/json"})


def _binary(payload: Payload, model: str, inputs: dict[str, NDArray[Any]]) -> LightRequest:
    tensors = [
        _described(name, each, payload) | {"parameters": {"binary_data_size": each.nbytes}}
        for name, each in inputs.items()
    ]
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return LightRequest(_infer_path(model), head + b"".join(each.tobytes() for each in inputs.values()), headers)


def _grpc(payload: Payload, model: str, inputs: dict[str, NDArray[Any]]) -> LightRequest:
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[each.tobytes() for each in inputs.values()])
    for name, each in inputs.items():
        message.inputs.add(name=name, datatype=payload.datatype, shape=each.shape)
    encoded = message.SerializeToString()
    return LightRequest(MODEL_INFER, b"\0" + struct.pack(">I", len(encoded)) + encoded)


def _shared(payload: Payload, model: str, inputs: dict[str, NDArray[Any]]) -> LightRequest:
    source, target = region_names(payload)
    [(name, each)] = inputs.items()
    size = {"shared_memory_byte_size": payload.byte_size}
    tensor = _described(name, each, payload) | {"parameters": {"shared_memory_region": source, **size}}
    output = {"name": "OUTPUT0", "parameters": {"shared_memory_region": target, **size}}
    body = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    return LightRequest(_infer_path(model), body, {"Content-Type": "application/json"})


def _generate(payload: Payload, model: str, inputs: dict[str, NDArray[Any]]) -> LightRequest:
    body = {name: each.ravel().tolist()[0] for name, each in inputs.items()}
    path = f"/v2/models/{model}/generate"
    return LightRequest(path, json.dumps(body).encode(), {"Content-Type": "application/json"})


def region_names(payload: Payload) -> tuple[str, str]:
    """Return the names of the regions of a case's input and output."""
    source, target = (name.format(payload.byte_size) for name in REGIONS)
    return source, target


def _described(name: str, tensor: NDArray[Any], payload: Payload) -> dict[str, Any]:
    return {"name": name, "shape": list(tensor.shape), "datatype": payload.datatype}


def _infer_path(model: str) -> str:
    return f"/v2/models/{model}/infer"


def wrong_outputs(case: LightCase, headers: dict[str, str], body: bytes) -> str:
    """Return what is wrong with the body of a successful response, or nothing. Header names are in lower case."""
    form = case.payload.form
    try:
        match form:
            case "grpc":
                found = _grpc_outputs(body)
            case "binary":
                found = _binary_outputs(body, int(headers["inference-header-content-length"]))
            case "generate":
                found = {name: [value] for name, value in json.loads(body).items() if name in case.outputs}
            case _:
                found = {each["name"]: each["data"] for each in json.loads(body)["outputs"]}
        return compared(case, found)
    except (ValueError, KeyError, TypeError, DecodeError) as error:
        return f"the response cannot be read: {error!r}"


def compared(case: LightCase, found: dict[str, Any]) -> str:
    """Return how outputs (lists, arrays or bytes, by name) differ from the case's, or nothing.

    Raises `ValueError` for elements of another kind.
    """
    for name, right in case.outputs.items():
        if name not in found:
            return f"the response has no output '{name}'"
        value = found[name]
        got = (
            np.frombuffer(value, right.dtype)
            if isinstance(value, bytes | memoryview)
            else np.array(value, right.dtype).ravel()
        )
        if got.shape != right.ravel().shape:
            return f"output '{name}' has {got.size} elements and not {right.size}"
        exact = case.payload.model != "mlp"  # sums in another order
        same = np.array_equal(got, right.ravel()) if exact else np.allclose(got, right.ravel(), 1e-3, 1e-3)
        if not same:
            return f"output '{name}' has wrong elements"
    return ""


def _grpc_outputs(body: bytes) -> dict[str, Any]:
    response = pb.ModelInferResponse.FromString(body[5:])
    names = [each.name for each in response.outputs]
    return dict(zip(names, response.raw_output_contents, strict=True))


def _binary_outputs(body: bytes, head_byte_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    position = head_byte_size
    for each in json.loads(body[:head_byte_size])["outputs"]:
        end = position + each["parameters"]["binary_data_size"]
        found[each["name"]] = body[position:end]
        position = end
    return found


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
        LightRow("light add_sub by weight binary c=8", small, "add_sub_by_weight", 8, triton_model="add_sub"),
        LightRow("light add_sub by weight grpc c=8", small_grpc, "add_sub_by_weight", 8, triton_model="add_sub"),
        LightRow("light add_sub by header binary c=8", small, "add_sub_by_header", 8, triton_model="add_sub"),
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
