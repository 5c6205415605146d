"""Bodies of load requests: the same parameters and errors, whether the body is large or not."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import pytest

from kernel.errors import ServingError
from protocols.http.json.document import LARGE_BYTE_SIZE
from protocols.http.load_request import decode_load

#: White space that makes a body large.
SPACE = b" " * (LARGE_BYTE_SIZE + 1)


def found(text: bytes | memoryview) -> Any:
    """Return the parameters, or the class and text of the error."""
    try:
        return decode_load(text)
    except ServingError as error:
        return type(error).__name__, error.message


FILE = base64.b64encode(b"content").decode()

BODIES = [
    json.dumps({"parameters": {"config": "{}", "file:1/model.py": FILE}}),
    '{"parameters":{}}',
    '{"parameters":{"file:a":"AAAA","file:a":"' + FILE + '"}}',
    '{"parameters":null}',
    '{"parameters":[]}',
    '{"parameters":"text"}',
    '{"parameters":{"config":1}}',
    '{"parameters":{"config":null}}',
    '{"parameters":{"config":NaN}}',
    '{"parameters":{"other":"x"}}',
    '{"parameters":{"file:a":"not base64"}}',
    '{"other":[{"a":[NaN, 1e5, "x", {}]}],"parameters":{"config":"caf\\u00e9"}}',
    "{}",
    "[1,2]",
    '"text"',
    json.dumps({"parameters": {f"file:{number}": "" for number in range(512)}}),
    json.dumps({"parameters": {f"file:{number}": "" for number in range(513)}}),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:40])
def test_a_large_body_has_the_parameters_and_errors_of_a_small_one(body: str) -> None:
    assert found(SPACE + body.encode()) == found(body.encode())
    assert found(memoryview(SPACE + body.encode())) == found(body.encode())


@pytest.mark.parametrize("body", ['{"parameters":{"config":"{}"}', "{]", "", '{"parameters":{"config":tru}}'])
def test_a_large_body_that_is_no_json_is_refused_with_the_place(body: str) -> None:
    kind, text = found(SPACE + body.encode())
    assert kind == "JsonSyntaxError"
    assert text.startswith("failed to parse the request JSON buffer: Invalid value. at ")


def test_a_large_body_that_is_nested_too_deep_is_refused() -> None:
    kind, text = found(b'{"other":' + b"[" * (2 << 20))
    assert kind == "TooDeep"
    assert "nesting depth" in text


def test_a_string_that_is_no_utf_8_is_refused() -> None:
    assert found(SPACE + b'{"parameters":{"config":"\xff"}}')[0] == "JsonSyntaxError"


def test_no_objects_are_made_of_what_is_not_used() -> None:
    text = b'{"other":[' + b'{"a":[]},' * (1 << 18) + b'1],"parameters":{"config":"{}"}}'
    tracemalloc.start()
    try:
        assert decode_load(text) == {"config": "{}"}
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
