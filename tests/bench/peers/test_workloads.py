"""Requests to peers and the check of their responses, for every way to write a body."""

from __future__ import annotations

import base64
import json
import struct
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from bench import triton
from bench.peers import workloads
from bench.peers.measurement import PEERS
from bench.peers.workloads import (
    ADD_SUB,
    BASE64_JSON,
    DIGITS,
    GRPC,
    MEBIBYTE,
    MSGPACK,
    PLAIN_JSON,
    RAW,
    TITLES,
    TREES,
    V2_BINARY,
    V2_JSON,
    BodyFormat,
    PeerMessage,
    WrongResponse,
    inputs_of,
    outputs_of,
)
from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Tensors = Mapping[str, NDArray[np.float32]]


def v2_json(outputs: Tensors) -> PeerMessage:
    tensors = [{"name": name, "data": values.ravel().tolist()} for name, values in outputs.items()]
    return PeerMessage({}, json.dumps({"outputs": tensors}).encode())


def v2_binary(outputs: Tensors) -> PeerMessage:
    tensors = [{"name": name, "parameters": {"binary_data_size": each.nbytes}} for name, each in outputs.items()]
    head = json.dumps({"outputs": tensors}).encode()
    body = head + b"".join(values.tobytes() for values in outputs.values())
    return PeerMessage({"inference-header-content-length": str(len(head))}, body)


def grpc_raw(outputs: Tensors) -> PeerMessage:
    message = pb.ModelInferResponse(raw_output_contents=[values.tobytes() for values in outputs.values()])
    for name in outputs:
        message.outputs.add(name=name)
    return PeerMessage({}, b"\0" + struct.pack(">I", 0) + message.SerializeToString())


def grpc_contents(outputs: Tensors) -> PeerMessage:
    message = pb.ModelInferResponse()
    for name, values in outputs.items():
        message.outputs.add(name=name).contents.fp32_contents.extend(values.ravel().tolist())
    return PeerMessage({}, b"\0" + struct.pack(">I", 0) + message.SerializeToString())


def plain_json(outputs: Tensors) -> PeerMessage:
    return PeerMessage({}, json.dumps({name: values.tolist() for name, values in outputs.items()}).encode())


def base64_json(outputs: Tensors) -> PeerMessage:
    texts = {name: base64.b64encode(values.tobytes()).decode() for name, values in outputs.items()}
    return PeerMessage({}, json.dumps(texts).encode())


def raw(outputs: Tensors) -> PeerMessage:
    return PeerMessage({}, b"".join(values.tobytes() for values in outputs.values()))


def packed(outputs: Tensors) -> PeerMessage:
    return PeerMessage({}, msgspec.msgpack.encode({name: values.tobytes() for name, values in outputs.items()}))


RESPONSES: list[tuple[BodyFormat, str, Callable[[Tensors], PeerMessage]]] = [
    (V2_JSON, ADD_SUB, v2_json),
    (V2_JSON, DIGITS, v2_json),
    (V2_BINARY, MEBIBYTE, v2_binary),
    (GRPC, ADD_SUB, grpc_raw),
    (GRPC, ADD_SUB, grpc_contents),
    (PLAIN_JSON, DIGITS, plain_json),
    (BASE64_JSON, MEBIBYTE, base64_json),
    (RAW, MEBIBYTE, raw),
    (MSGPACK, MEBIBYTE, packed),
]
IDS = [f"{body.name} {respond.__name__} {model}" for body, model, respond in RESPONSES]


@pytest.mark.parametrize(("body", "model", "respond"), RESPONSES, ids=IDS)
def test_a_correct_response_passes(body: BodyFormat, model: str, respond: Callable[[Tensors], PeerMessage]) -> None:
    body.check(model, respond(outputs_of(model)))
    assert body.read(respond(outputs_of(model))).keys() == outputs_of(model).keys()


@pytest.mark.parametrize(("body", "model", "respond"), RESPONSES, ids=IDS)
def test_a_response_with_wrong_values_does_not(
    body: BodyFormat, model: str, respond: Callable[[Tensors], PeerMessage]
) -> None:
    wrong = {name: values + np.float32(1) for name, values in outputs_of(model).items()}
    with pytest.raises(WrongResponse, match="is not what it should be"):
        body.check(model, respond(wrong))


@pytest.mark.parametrize(("body", "model", "respond"), RESPONSES, ids=IDS)
def test_a_response_that_cannot_be_read_says_so(
    body: BodyFormat, model: str, respond: Callable[[Tensors], PeerMessage]
) -> None:
    with pytest.raises(WrongResponse, match=f"{model}: "):
        body.check(model, PeerMessage({}, b"Internal Server Error"))


def test_a_response_that_lacks_an_output_does_not_pass() -> None:
    with pytest.raises(WrongResponse, match="OUTPUT1"):
        PLAIN_JSON.check(ADD_SUB, plain_json({"OUTPUT0": outputs_of(ADD_SUB)["OUTPUT0"]}))


def test_requests_carry_the_same_floats_in_every_form() -> None:
    expected = {name: values.tolist() for name, values in inputs_of(ADD_SUB).items()}
    plain = json.loads(PLAIN_JSON.request(ADD_SUB).body)
    v2 = {each["name"]: each["data"] for each in json.loads(V2_JSON.request(ADD_SUB).body)["inputs"]}
    assert {name: np.float32(values).tolist() for name, values in plain.items()} == expected
    assert {name: np.float32(values).tolist() for name, values in v2.items()} == expected


def test_a_grpc_request_is_a_message_with_its_prefix() -> None:
    body = GRPC.request(MEBIBYTE).body
    assert struct.unpack(">I", body[1:5]) == (len(body) - 5,)
    assert pb.ModelInferRequest.FromString(body[5:]).raw_input_contents[0] == inputs_of(MEBIBYTE)["INPUT0"].tobytes()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_request_for_each_of_its_models(peer: object) -> None:
    found = next(each for each in PEERS if each is peer)
    assert found.endpoints.keys() <= TITLES.keys()
    for model, endpoint in (*found.endpoints.items(), *found.grpc.items()):
        assert endpoint.body.request(model).body


def test_the_model_of_trees_is_trained_once_and_its_response_is_that_of_xgboost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xgboost = pytest.importorskip("xgboost")
    monkeypatch.setattr(workloads, "CACHE", tmp_path)
    workloads.trees_model.cache_clear()
    try:
        path = workloads.trees_model()
        written = path.stat().st_mtime_ns
        workloads.trees_model.cache_clear()
        assert workloads.trees_model().stat().st_mtime_ns == written
        found = xgboost.Booster(model_file=path)
        assert (found.num_boosted_rounds(), found.num_features()) == (200, 30)
        expected = found.inplace_predict(inputs_of(TREES)["input__0"])
        V2_JSON.check(TREES, v2_json({"output__0": expected}))
        with pytest.raises(WrongResponse, match="output__0 is not what it should be"):
            V2_JSON.check(TREES, v2_json({"output__0": expected + np.float32(1)}))
    finally:
        workloads.trees_model.cache_clear()


def test_without_xgboost_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "CACHE", tmp_path)
    monkeypatch.setitem(sys.modules, "xgboost", None)
    workloads.trees_model.cache_clear()
    with pytest.raises(triton.NotAvailable, match="pip install xgboost-cpu"):
        workloads.trees_model()
