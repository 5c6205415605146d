"""What every peer serves: three models, the requests to them, and the responses that are correct."""

from __future__ import annotations

import base64
import functools
import json
import os
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from bench.checkout import ROOT
from bench.triton import CACHE, NotAvailable
from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Tensors = Mapping[str, NDArray[np.float32]]

#: The classifier of handwritten digits that comes with the server.
DIGITS_MODEL = ROOT / "kernel/demo/digits/1/model.onnx"
DIGITS_REQUEST = ROOT / "kernel/demo/digit.json"

FLOATS_OF_A_MIB = (1 << 20) // 4

ADD_SUB, DIGITS, MEBIBYTE, TREES = "add_sub", "digits", "identity", "trees"
TITLES = {ADD_SUB: "add_sub, 16 floats", DIGITS: "digits, ONNX", MEBIBYTE: "1 MiB tensor", TREES: "200 trees, JSON"}

#: The columns of `trees`, which is made by `trees_model`.
TREES_COLUMNS = 30


class WrongResponse(Exception):
    """A response that is an error or has wrong values; the message says which."""


def inputs_of(model: str) -> Tensors:
    """Return the inputs of every request to a model, the same in every run."""
    random = np.random.default_rng(0)
    if model == ADD_SUB:
        return {name: random.random(16, np.float32) for name in ("INPUT0", "INPUT1")}
    if model == DIGITS:
        pixels = json.loads(DIGITS_REQUEST.read_bytes())["inputs"][0]["data"]
        return {"image": np.array(pixels, np.float32).reshape(1, 8, 8)}
    if model == TREES:
        return {"input__0": random.random((1, TREES_COLUMNS), np.float32)}
    return {"INPUT0": random.random((1, FLOATS_OF_A_MIB), np.float32)}


@functools.cache
def trees_model() -> Path:
    """Return the file of an XGBoost model of 200 trees of depth 6, in JSON. It is trained if it is not there.

    Raises `NotAvailable` without xgboost.
    """
    path = CACHE / "trees-1.json"
    if not path.exists():
        xgboost = _xgboost()
        random = np.random.default_rng(0)
        rows = random.random((4000, TREES_COLUMNS), np.float32)
        labels = rows[:, :8].sum(axis=1) + rows[:, 8] * rows[:, 9] + random.normal(0, 0.1, len(rows))
        data = xgboost.DMatrix(rows, labels)
        settings = {"max_depth": 6, "nthread": 1, "objective": "reg:squarederror"}
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{os.getpid()}-{path.name}")
        xgboost.train(settings, data, 200).save_model(written)
        written.rename(path)
    return path


def _xgboost() -> Any:
    try:
        import xgboost  # with what it imports it takes a second
    except ImportError as error:
        raise NotAvailable(f"the model of trees needs xgboost: pip install xgboost-cpu ({error})") from None
    return xgboost


def outputs_of(model: str) -> Tensors:
    """Return the outputs that a correct response has. Those of `digits` are computed by ONNX Runtime
    here, those of `trees` by xgboost."""
    inputs = inputs_of(model)
    if model == ADD_SUB:
        first, second = inputs.values()
        return {"OUTPUT0": first + second, "OUTPUT1": first - second}
    if model == DIGITS:
        import onnxruntime

        session = onnxruntime.InferenceSession(DIGITS_MODEL, providers=["CPUExecutionProvider"])
        return {"scores": session.run(["scores"], dict(inputs))[0]}
    if model == TREES:
        booster = _xgboost().Booster(model_file=trees_model())
        return {"output__0": booster.inplace_predict(inputs["input__0"])}
    return {"OUTPUT0": inputs["INPUT0"]}


class PeerMessage(msgspec.Struct, frozen=True):
    """A request or a response: header fields with lower-case names, and a body."""

    headers: dict[str, str]
    body: bytes


class BodyFormat(msgspec.Struct, frozen=True):
    """A way to write tensors into a body, and to read the tensors of a response.

    `write(model, inputs)` returns the request. `read(response)` returns the outputs by name, flat; `check` compares
    only values, because peers that use plain JSON have no shapes.
    """

    name: str
    write: Callable[[str, Tensors], PeerMessage]
    read: Callable[[PeerMessage], dict[str, Any]]

    def request(self, model: str) -> PeerMessage:
        """Return the request that every client sends to `model`."""
        return self.write(model, inputs_of(model))

    def check(self, model: str, response: PeerMessage) -> None:
        """Compare a response with the correct outputs. Raises `WrongResponse`."""
        try:
            found = self.read(response)
        except (ValueError, KeyError, TypeError, IndexError, msgspec.MsgspecError, DecodeError) as error:
            raise WrongResponse(f"{model}: not readable as {self.name}: {error!r}: {response.body[:200]!r}") from None
        for name, expected in outputs_of(model).items():
            values = np.asarray(found.get(name, []), np.float32).ravel()
            if values.shape != expected.ravel().shape or not np.allclose(values, expected.ravel(), rtol=1e-4):
                raise WrongResponse(f"{model}: {name} is not what it should be: {response.body[:200]!r}")


_JSON = {"content-type": "application/json"}
_BYTES = {"content-type": "application/octet-stream"}


def _short(values: NDArray[np.float32]) -> Any:
    """Return nested lists of the shortest decimal numbers that are these floats."""
    flat = [float(str(value)) for value in values.ravel()]
    if values.ndim < 2:
        return flat
    return np.array(flat).reshape(values.shape).tolist()


def _v2_json(model: str, inputs: Tensors) -> PeerMessage:
    tensors = [
        {"name": name, "datatype": "FP32", "shape": values.shape, "data": _short(values.ravel())}
        for name, values in inputs.items()
    ]
    return PeerMessage(_JSON, msgspec.json.encode({"inputs": tensors}))


def _read_v2_json(response: PeerMessage) -> dict[str, Any]:
    return {each["name"]: each["data"] for each in json.loads(response.body)["outputs"]}


def _v2_binary(model: str, inputs: Tensors) -> PeerMessage:
    tensors = [
        {"name": name, "datatype": "FP32", "shape": values.shape, "parameters": {"binary_data_size": values.nbytes}}
        for name, values in inputs.items()
    ]
    head = msgspec.json.encode({"inputs": tensors, "parameters": {"binary_data_output": True}})
    body = head + b"".join(values.tobytes() for values in inputs.values())
    return PeerMessage({**_BYTES, "inference-header-content-length": str(len(head))}, body)


def _read_v2_binary(response: PeerMessage) -> dict[str, Any]:
    length = int(response.headers["inference-header-content-length"])
    found: dict[str, Any] = {}
    position = length
    for each in json.loads(response.body[:length])["outputs"]:
        end = position + each["parameters"]["binary_data_size"]
        found[each["name"]] = np.frombuffer(response.body[position:end], np.float32)
        position = end
    return found


def _grpc(model: str, inputs: Tensors) -> PeerMessage:
    message = pb.ModelInferRequest(
        model_name=model, raw_input_contents=[values.tobytes() for values in inputs.values()]
    )
    for name, values in inputs.items():
        message.inputs.add(name=name, datatype="FP32", shape=values.shape)
    encoded = message.SerializeToString()
    return PeerMessage(
        {"content-type": "application/grpc", "te": "trailers"}, b"\0" + struct.pack(">I", len(encoded)) + encoded
    )


def _read_grpc(response: PeerMessage) -> dict[str, Any]:
    message = pb.ModelInferResponse.FromString(response.body[5:])
    raw = list(message.raw_output_contents)
    return {
        output.name: np.frombuffer(raw[number], np.float32) if raw else list(output.contents.fp32_contents)
        for number, output in enumerate(message.outputs)
    }


def _named_lists(model: str, inputs: Tensors) -> PeerMessage:
    return PeerMessage(_JSON, msgspec.json.encode({name: _short(values) for name, values in inputs.items()}))


def _read_json(response: PeerMessage) -> dict[str, Any]:
    return dict(json.loads(response.body))


def _base64_json(model: str, inputs: Tensors) -> PeerMessage:
    texts = {name: base64.b64encode(values.tobytes()).decode() for name, values in inputs.items()}
    return PeerMessage(_JSON, msgspec.json.encode(texts))


def _read_base64_json(response: PeerMessage) -> dict[str, Any]:
    texts = json.loads(response.body)
    return {name: np.frombuffer(base64.b64decode(text), np.float32) for name, text in texts.items()}


def _raw(model: str, inputs: Tensors) -> PeerMessage:
    (values,) = inputs.values()
    return PeerMessage(_BYTES, values.tobytes())


def _read_raw(response: PeerMessage) -> dict[str, Any]:
    return {"OUTPUT0": np.frombuffer(response.body, np.float32)}


def _msgpack(model: str, inputs: Tensors) -> PeerMessage:
    body = msgspec.msgpack.encode({name: values.tobytes() for name, values in inputs.items()})
    return PeerMessage({"content-type": "application/msgpack"}, body)


def _read_msgpack(response: PeerMessage) -> dict[str, Any]:
    found = msgspec.msgpack.decode(response.body, type=dict[str, bytes])
    return {name: np.frombuffer(data, np.float32) for name, data in found.items()}


#: The inference protocol of KServe and Triton, as JSON, with binary tensors, and as a gRPC message with its prefix.
V2_JSON = BodyFormat("JSON (v2)", _v2_json, _read_v2_json)
V2_BINARY = BodyFormat("binary (v2)", _v2_binary, _read_v2_binary)
GRPC = BodyFormat("gRPC", _grpc, _read_grpc)
#: An object of lists, `{"INPUT0": [...], "INPUT1": [...]}`: what servers without a protocol of their own are sent.
PLAIN_JSON = BodyFormat("JSON", _named_lists, _read_json)
BASE64_JSON = BodyFormat("base64 in JSON", _base64_json, _read_base64_json)
RAW = BodyFormat("bytes", _raw, _read_raw)
MSGPACK = BodyFormat("msgpack", _msgpack, _read_msgpack)
