"""The JSON bodies of attackers are what they say: counts, depths, sizes."""

from __future__ import annotations

import json

from bench.heavy import bodies


def test_a_list_has_as_many_equal_parts_as_fit() -> None:
    count, text = bodies.repeated('"ab"', 100)
    assert json.loads(text) == ["ab"] * count
    assert 95 <= len(text) <= 101


def test_a_request_has_as_many_elements_as_its_shape_says() -> None:
    (tensor,) = json.loads(bodies.elements("FP32", "1.5", 1000))["inputs"]
    assert tensor == {"name": "INPUT0", "datatype": "FP32", "shape": [250], "data": [1.5] * 250}


def test_further_members_stand_in_the_request_and_in_its_input() -> None:
    request = json.loads(bodies.infer("FP32", "[1]", "[1]", more='"id":"a",', tensor='"x":1,'))
    assert request["id"] == "a"
    assert request["inputs"][0]["x"] == 1


def test_members_have_different_names() -> None:
    members = json.loads(f"{{{bodies.numbered('1', 1000)}}}")
    assert len(members) == 1000 // 13


def test_lists_and_objects_are_nested_as_deep_as_fits() -> None:
    assert bodies.nested("[", 10) == "[[[[[]]]]]"
    assert json.loads(bodies.nested('{"a":', 12)) == {"a": {"a": 0}}


def test_binary_data_follows_its_json() -> None:
    body, headers = bodies.binary("UINT8", 3, b"abc", wanted={"binary_data_output": True})
    length = int(headers["Inference-Header-Content-Length"])
    head = json.loads(body[:length])
    assert head["inputs"][0]["shape"] == [3]
    assert head["inputs"][0]["parameters"] == {"binary_data_size": 3}
    assert head["parameters"] == {"binary_data_output": True}
    assert body[length:] == b"abc"


def test_different_floats_are_a_valid_request() -> None:
    (tensor,) = json.loads(bodies.different_floats(1))["inputs"]
    assert tensor["shape"] == [len(tensor["data"])]
    assert len(set(tensor["data"])) > 90_000
