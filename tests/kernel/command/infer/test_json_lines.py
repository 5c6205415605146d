"""`naiad infer --json`: a response is one line of JSON, which strict parsers read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernel.command.infer.connection import ClientError
from kernel.command.infer.elements import encode_elements
from kernel.command.infer.json_lines import event_line, response_line


def parsed(line: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert "\n" not in line
    return json.loads(line, parse_constant=refuse)


def response(datatype: str, elements: list[Any], **others: Any) -> tuple[dict[str, Any], bytes]:
    raw = encode_elements(datatype, elements)
    output = {
        "name": "OUT", "datatype": datatype, "shape": [len(elements)], "parameters": {"binary_data_size": len(raw)}
    }  # fmt: skip
    return {"model_name": "m", "model_version": "1", **others, "outputs": [output]}, raw


def test_a_line_has_the_response_as_the_protocol_has_it_with_all_elements() -> None:
    found = parsed(response_line(*response("INT32", list(range(100)), parameters={"a": 1})))
    assert found == {
        "model_name": "m",
        "model_version": "1",
        "parameters": {"a": 1},
        "outputs": [{"name": "OUT", "datatype": "INT32", "shape": [100], "data": list(range(100))}],
    }


@pytest.mark.parametrize(
    ("datatype", "elements", "data"),
    [
        ("FP32", [0.5, "nan", "inf", "-inf"], [0.5, "NaN", "Infinity", "-Infinity"]),
        ("BF16", [0.5], [0.5]),
        ("BOOL", [True, False], [True, False]),
        ("BYTES", ["a\n\u00e9", b"\xff\x00"], ["a\n\u00e9", {"b64": "/wA="}]),
        ("FP32", [], []),
    ],
)
def test_elements_that_json_does_not_have_get_a_form(datatype: str, elements: list[Any], data: list[Any]) -> None:
    [output] = parsed(response_line(*response(datatype, elements)))["outputs"]
    assert output["data"] == data


def test_outputs_that_came_as_json_stay_as_they_are() -> None:
    output = {"name": "OUT", "datatype": "BYTES", "shape": [1], "data": ["a"], "parameters": {"kept": True}}
    assert parsed(response_line({"outputs": [output]}, b"")) == {"outputs": [output]}


def test_raw_bytes_that_are_no_tensor_are_an_error_that_names_the_output() -> None:
    head, raw = response("INT32", [1])
    head["outputs"][0]["parameters"]["binary_data_size"] = 3
    with pytest.raises(ClientError, match="output 'OUT' cannot be read: 3 bytes are no tensor of INT32"):
        response_line(head, raw)


def test_an_event_gets_its_shapes_from_the_metadata_and_keeps_parameters() -> None:
    outputs = [
        {"name": "OUT", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "N", "datatype": "INT32", "shape": [1]},
        {"name": "ABSENT", "datatype": "INT32", "shape": [1]},
    ]
    found = parsed(event_line({"last": True, "N": 3, "OUT": [1.0, 2.0]}, {"name": "m", "outputs": outputs}))
    assert found == {
        "model_name": "m",
        "outputs": [
            {"name": "OUT", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]},
            {"name": "N", "datatype": "INT32", "shape": [1], "data": [3]},
        ],
        "parameters": {"last": True},
    }
