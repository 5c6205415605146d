"""Prepared requests carry what they say, and a response with other numbers is found."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bench.light_rows import (
    BINARY,
    GENERATE,
    GRPC,
    JSON,
    SHARED,
    LightCase,
    Payload,
    build_case,
    compared,
    region_names,
    wrong_outputs,
)
from bench.models import MLP_WIDTH, mlp_output
from protocols.grpc.generated import grpc_service_pb2 as pb

ADD_SUB = {form: build_case(Payload(form, "add_sub", 16), "add_sub") for form in (JSON, BINARY, GRPC)}


def json_response(case: LightCase, **changes: Any) -> bytes:
    outputs = [{"name": name, "data": each.ravel().tolist()} for name, each in case.outputs.items()]
    outputs[0] |= changes
    return json.dumps({"outputs": outputs}).encode()


def test_a_payload_is_the_same_in_every_run() -> None:
    assert build_case.__wrapped__(Payload(JSON, "add_sub", 16), "add_sub").request == ADD_SUB[JSON].request


def test_numbers_in_json_are_those_of_the_tensor_with_all_their_digits() -> None:
    body = json.loads(ADD_SUB[JSON].request.body)
    assert [each["name"] for each in body["inputs"]] == ["INPUT0", "INPUT1"]
    for each in body["inputs"]:
        tensor = ADD_SUB[JSON].inputs[each["name"]]
        assert (each["shape"], each["datatype"]) == ([16], "FP32")
        np.testing.assert_array_equal(np.array(each["data"], np.float32), tensor)


def test_a_thousand_floats_are_twenty_kilobytes_of_text() -> None:
    request = build_case(Payload(JSON, "identity", 1024), "identity").request
    assert 18_000 < len(request.body) < 24_000
    assert request.path == "/v2/models/identity/infer"


def test_a_binary_request_has_its_tensors_behind_the_json() -> None:
    case = ADD_SUB[BINARY]
    head = int(case.request.headers["Inference-Header-Content-Length"])
    sizes = [each["parameters"]["binary_data_size"] for each in json.loads(case.request.body[:head])["inputs"]]
    assert sizes == [64, 64]
    assert case.request.body[head:] == b"".join(each.tobytes() for each in case.inputs.values())


def test_a_grpc_message_has_its_prefix_and_its_tensors() -> None:
    case = build_case(Payload(GRPC, "identity", 3, "INT64"), "m")
    assert case.request.body[:5] == b"\0" + (len(case.request.body) - 5).to_bytes(4)
    message = pb.ModelInferRequest.FromString(case.request.body[5:])
    assert (message.model_name, message.inputs[0].datatype, [*message.inputs[0].shape]) == ("m", "INT64", [1, 3])
    assert message.raw_input_contents[0] == case.inputs["INPUT0"].tobytes()


def test_words_are_short_and_generate_has_one_as_a_member() -> None:
    words = build_case(Payload(JSON, "identity", 1024, "BYTES"), "m").inputs["INPUT0"].ravel()
    assert {*map(len, words)} == {*range(3, 10)}
    case = build_case(Payload(GENERATE, "identity", 1, "BYTES"), "m")
    [word] = case.inputs["INPUT0"].ravel()
    assert json.loads(case.request.body) == {"INPUT0": word}
    assert case.request.path == "/v2/models/m/generate"
    body = json.dumps({"model_name": "m", "OUTPUT0": word}).encode()
    assert wrong_outputs(case, {}, body) == ""
    assert wrong_outputs(case, {}, body.replace(word.encode(), b"other")) == "output 'OUTPUT0' has wrong elements"


def test_a_request_with_shared_memory_names_both_regions() -> None:
    payload = Payload(SHARED, "identity", 256)
    body = json.loads(build_case(payload, "m").request.body)
    names = [each["parameters"]["shared_memory_region"] for each in (body["inputs"][0], body["outputs"][0])]
    assert tuple(names) == region_names(payload) == ("naiad_bench_in_1024", "naiad_bench_out_1024")
    assert body["outputs"][0]["parameters"]["shared_memory_byte_size"] == 1024


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"data": [1.0] * 16}, "output 'OUTPUT0' has wrong elements"),
        ({"data": [1.0] * 15}, "output 'OUTPUT0' has 15 elements and not 16"),
        ({"name": "OTHER"}, "the response has no output 'OUTPUT0'"),
        ({"data": ["x"]}, "the response cannot be read"),
    ],
)
def test_wrong_numbers_in_json_are_found(changes: dict[str, Any], reason: str) -> None:
    found = wrong_outputs(ADD_SUB[JSON], {}, json_response(ADD_SUB[JSON], **changes))
    assert found.startswith(reason)
    assert bool(found) is bool(reason)


def test_a_response_that_is_not_json_is_wrong() -> None:
    assert wrong_outputs(ADD_SUB[JSON], {}, b"<html>").startswith("the response cannot be read: JSONDecodeError")


def test_wrong_numbers_in_binary_and_grpc_are_found() -> None:
    raw = [each.tobytes() for each in ADD_SUB[BINARY].outputs.values()]
    sizes = [
        {"name": name, "parameters": {"binary_data_size": len(each)}}
        for name, each in zip(("OUTPUT0", "OUTPUT1"), raw, strict=True)
    ]
    head = json.dumps({"outputs": sizes}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    assert wrong_outputs(ADD_SUB[BINARY], headers, head + b"".join(raw)) == ""
    assert "wrong elements" in wrong_outputs(ADD_SUB[BINARY], headers, head + b"".join(reversed(raw)))
    assert "KeyError" in wrong_outputs(ADD_SUB[BINARY], {}, head)
    assert "DecodeError" in wrong_outputs(ADD_SUB[GRPC], {}, b"12345678")

    message = pb.ModelInferResponse(raw_output_contents=raw)
    for name in ("OUTPUT0", "OUTPUT1"):
        message.outputs.add(name=name)
    assert wrong_outputs(ADD_SUB[GRPC], {}, bytes(5) + message.SerializeToString()) == ""
    message.raw_output_contents[1] = raw[0]
    assert "'OUTPUT1' has wrong elements" in wrong_outputs(ADD_SUB[GRPC], {}, bytes(5) + message.SerializeToString())


def test_sums_in_another_order_are_right() -> None:
    case = build_case(Payload(BINARY, "mlp", MLP_WIDTH), "mlp_onnx")
    right = case.outputs["OUTPUT0"]
    assert 0.1 < right.std() < 10
    assert compared(case, {"OUTPUT0": (right * 1.000001).tobytes()}) == ""
    assert compared(case, {"OUTPUT0": (right * 1.1).tobytes()}) == "output 'OUTPUT0' has wrong elements"
    assert not np.array_equal(mlp_output(case.inputs["INPUT0"] * 2), right)
