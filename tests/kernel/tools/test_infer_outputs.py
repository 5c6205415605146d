"""`naiad infer`: what is requested, and a response becomes lines.

`naiad infer --json`: a response is one line of JSON, which strict parsers read.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from kernel.tools.client import ClientError
from kernel.tools.elements import encode_elements
from kernel.tools.infer_outputs import (
    SHOWN_VALUES,
    build_outputs,
    classified,
    event_line,
    format_event,
    format_outputs,
    format_streamed,
    response_line,
)

METADATA = {
    "name": "m",
    "outputs": [{"name": "OUT", "datatype": "FP32"}, {"name": "SCORES", "datatype": "FP32"}],
}


def lines(*outputs: tuple[str, str, list[int], list[Any]], classes: tuple[str, ...] = ()) -> list[str]:
    """Return the lines of a response with outputs of name, datatype, shape and elements."""
    raws = [encode_elements(datatype, elements) for _, datatype, _, elements in outputs]
    response = {
        "outputs": [
            {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
            for (name, datatype, shape, _), raw in zip(outputs, raws, strict=True)
        ]
    }
    return list(format_outputs(response, b"".join(raws), classes))


def test_every_output_is_requested_as_raw_bytes_and_those_with_labels_or_on_request_as_classes() -> None:
    config = {"output": [{"name": "SCORES", "label_filename": "labels.txt"}]}
    outputs = build_outputs(METADATA, config, 0)
    assert outputs == [
        {"name": "OUT", "parameters": {"binary_data": True}},
        {"name": "SCORES", "parameters": {"binary_data": True, "classification": 3}},
    ]
    assert classified(outputs) == {"SCORES"}
    assert classified(build_outputs(METADATA, {}, 5)) == {"OUT", "SCORES"}


def test_outputs_that_can_have_no_classes_are_requested_as_they_are() -> None:
    texts = {"name": "m", "outputs": [{"name": "TEXT", "datatype": "BYTES"}, {"name": "P", "datatype": "FP64"}]}
    assert classified(build_outputs(texts, {}, 2)) == {"P"}
    only = {"name": "m", "outputs": [{"name": "TEXT", "datatype": "BYTES"}, {"name": "H", "datatype": "FP16"}]}
    with pytest.raises(ClientError, match=r"model 'm' has only TEXT \(BYTES\), H \(FP16\)"):
        build_outputs(only, {}, 2)
    assert classified(build_outputs(only, {"output": [{"name": "TEXT", "label_filename": "l.txt"}]}, 0)) == set()


def test_numbers_are_formatted_for_people() -> None:
    assert lines(
        ("SUM", "FP32", [1, 2], [1.0, 0.1]), ("HALF", "BF16", [1], [0.1]), ("B", "BOOL", [2], [True, False])
    ) == [
        "SUM  FP32 1x2",
        "  1, 0.1",
        "HALF  BF16 1",
        "  0.0996094",
        "B  BOOL 2",
        "  true, false",
    ]
    assert lines(("X", "FP16", [3], ["nan", "inf", "-inf"]))[1] == "  nan, inf, -inf"


def test_long_outputs_are_cut_and_empty_ones_say_so() -> None:
    assert lines(("LONG", "INT32", [40], list(range(40))))[-1] == "  … and 8 more"
    assert lines(("TEXTS", "BYTES", [40], ["x"] * 40))[-1] == "  … and 8 more"
    assert lines(("NONE", "FP32", [0, 4], [])) == ["NONE  FP32 0x4", "  no elements"]
    assert lines(("ONE", "FP32", [], [2])) == ["ONE  FP32 scalar", "  2"]


def test_classes_are_shown_with_their_labels_and_texts_stay_as_they_are() -> None:
    shown = lines(
        ("BEST", "BYTES", [3], ["0.931724:6:six", "0.5:3", "no class"]),
        ("TEXT", "BYTES", [1], ["12:30:noon"]),
        classes=("BEST",),
    )
    assert [line.split() for line in shown[1:4]] == [["six", "0.931724"], ["3", "0.5"], ["no", "class"]]
    assert shown[5] == "  12:30:noon"


def test_texts_cannot_control_the_terminal() -> None:
    raw = b"\3\0\0\0\x1b[2" + b"\2\0\0\0\xff\n"
    output = {"name": "T", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(raw)}}
    assert list(format_outputs({"outputs": [output]}, raw, ()))[1:] == ["  \\u001b[2", "  b'\\xff\\n'"]


def test_outputs_that_came_as_json_are_shown_too() -> None:
    output = {"name": "T", "datatype": "FP32", "shape": [2], "data": [1.5, 2]}
    assert list(format_outputs({"outputs": [output]}, b"", ())) == ["T  FP32 2", "  1.5, 2"]


def test_a_response_that_cannot_be_read_names_the_output() -> None:
    output = {"name": "T", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 5}}
    with pytest.raises(ClientError, match="output 'T' cannot be read: 5 bytes are no tensor of FP32"):
        list(format_outputs({"outputs": [output]}, struct.pack("<fx", 1), ()))


def streamed(*outputs: tuple[str, str, list[Any]], classes: tuple[str, ...] = ()) -> str:
    """Return the line of a response with outputs of name, datatype and elements."""
    raws = [encode_elements(datatype, elements) for _, datatype, elements in outputs]
    parts = [
        {"name": name, "datatype": datatype, "shape": [len(elements)], "parameters": {"binary_data_size": len(raw)}}
        for (name, datatype, elements), raw in zip(outputs, raws, strict=True)
    ]
    return format_streamed({"outputs": parts}, b"".join(raws), classes)


def test_a_response_of_a_stream_is_one_line() -> None:
    assert streamed(("A", "FP16", [0.5]), ("B", "BF16", [1, 2])) == "A = 0.5, B = [1, 2]"
    assert streamed(("TEXT", "BYTES", ["a\x1bb"]), ("NONE", "INT8", [])) == "TEXT = a\\u001bb, NONE = []"
    assert streamed(("LONG", "INT8", [7] * 40)) == f"LONG = [{'7, ' * SHOWN_VALUES}… and 8 more]"
    assert streamed(("S", "BYTES", ["0.5:3:cat", "0.25:1"]), classes=("S",)) == "S = [cat 0.5, 1 0.25]"
    assert streamed() == ""


def test_a_response_of_a_stream_that_came_as_json_has_its_outputs_first() -> None:
    event = {"PARAMETER": True, "SCORES": [1.5, 2], "OUT": "a\nb"}
    assert format_event(event, METADATA) == "OUT = a\nb, SCORES = [1.5, 2], PARAMETER = true"


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
