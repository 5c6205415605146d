"""What `naiad shadow-of` copies, and how it compares responses."""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import pytest

from kernel.errors import BadOption
from kernel.tools.shadow_of import (
    Comparison,
    CopiedResponse,
    Exchange,
    Message,
    NotCompared,
    ProxySettings,
    check_request,
    compare_exchange,
    is_inference,
    rules_of,
    shadow_server,
    sides_of,
)


def message(document: Any, binary: bytes = b"", **headers: str) -> Message:
    text = json.dumps(document).encode()
    if binary:
        headers["inference-header-content-length"] = str(len(text))
    return Message(headers, text + binary)


def response(value: float, *, binary: bool = False) -> Message:
    output: dict[str, Any] = {"name": "OUT", "datatype": "FP32", "shape": [1]}
    if binary:
        return message({"outputs": [{**output, "parameters": {"binary_data_size": 4}}]}, struct.pack("f", value))
    return message({"outputs": [{**output, "data": [value]}]})


def compared(status: int, other: int, first: Message, second: Message) -> str:
    exchange = Exchange("/v2/models/m/infer", message({}), status, first)
    return ",".join(each.kind for each in compare_exchange(exchange, CopiedResponse(other, second), set(), {}))


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("POST", "/v2/models/m/infer", True),
        ("POST", "/v2/models/m/versions/3/infer?x=1", True),
        ("GET", "/v2/models/m/infer", False),
        ("POST", "/v2/models/m/generate", False),
        ("POST", "/v2/repository/models/m/load", False),
    ],
)
def test_inference_requests_are_copied(method: str, target: str, expected: bool) -> None:
    assert is_inference(method, target) is expected


def test_json_and_binary_responses_are_the_same_values() -> None:
    assert compared(200, 200, response(1.5), response(1.5, binary=True)) == ""
    assert compared(200, 200, response(1.5), response(2.5, binary=True)) == "values"
    zipped = response(1.5)
    zipped.headers["content-encoding"], zipped.body = "gzip", gzip.compress(zipped.body)
    assert compared(200, 200, zipped, response(1.5)) == ""
    texts = [{"name": "T", "datatype": "BYTES", "shape": [2], "data": ["a", "é"]}]
    [(side, data)] = sides_of(message({"outputs": texts}), set())
    assert (side.name, data) == ("T", b"\x01\0\0\0a\x02\0\0\0\xc3\xa9")


def test_errors_of_one_side_are_differences() -> None:
    assert compared(400, 500, message({}), message({})) == ""
    assert compared(200, 400, response(1), message({})) == "error"
    assert compared(400, 200, message({}), response(1)) == "error"
    with pytest.raises(NotCompared, match="our server was busy"):
        compared(200, 503, response(1), message({}))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Message({}, b"{"), "bodies that are not JSON"),
        (Message({}, b"[]"), "bodies that are not JSON"),
        (Message({}, b"{}"), "responses that are not those of an inference server"),
        (Message({"content-encoding": "br"}, b""), "bodies with an unknown compression"),
        (Message({"content-encoding": "gzip"}, b"no"), "bodies with an unknown compression"),
        (Message({"content-encoding": "gzip"}, gzip.compress(bytes(17 << 20))), "bodies that are too large"),
        (Message({"inference-header-content-length": "x"}, b"{}"), "bodies that are not JSON"),
        (message({"outputs": [{"name": "A", "datatype": "FP32", "shape": [1], "data": ["x"]}]}), "responses that"),
        (message({"outputs": [{"name": "A", "datatype": "NEW", "shape": [1], "data": [1]}]}), "responses that"),
        (message({"outputs": [{"name": "A", "datatype": "FP32", "shape": [1], "parameters": 3}]}), "responses that"),
    ],
)
def test_what_cannot_be_read_is_not_compared(found: Message, reason: str) -> None:
    with pytest.raises(NotCompared, match=reason):
        sides_of(found, set())


def test_requests_that_another_server_cannot_repeat_are_not_copied() -> None:
    assert check_request(message({"id": "7", "outputs": [{"name": "A", "parameters": {"classification": 2}}]})) == (
        "7", {"A"},
    )  # fmt: skip
    with pytest.raises(NotCompared, match="requests of sequences"):
        check_request(message({"parameters": {"sequence_id": 3}}))
    with pytest.raises(NotCompared, match="tensors in shared memory"):
        check_request(message({"inputs": [{"parameters": {"shared_memory_region": "r"}}]}))


def test_the_report_counts_and_has_an_exit_code() -> None:
    found = Comparison({})
    assert found.exit_code == 2
    exchange = Exchange("/v2/models/m/infer", message({}), 200, response(1))
    found.add(exchange.path, "x", compare_exchange(exchange, CopiedResponse(200, response(1)), set(), {}))
    assert found.exit_code == 0
    found.add(exchange.path, "y", compare_exchange(exchange, CopiedResponse(200, response(2)), set(), {}))
    found.drop("too many wait")
    found.unread_connections = 1
    text = found.as_text("http://ours", 100)
    assert found.exit_code == 1
    assert "pairs: 2, different 1" in text
    assert "differs: /v2/models/m/infer, request 'y': output 'OUT' values: element 0 is 2.0" in text
    assert "not compared: 1, too many wait" in text
    assert "connections passed on without a comparison: 1 " in text


@pytest.mark.parametrize(
    ("old", "server", "listen", "output", "text"),
    [
        ("https://x", "y:1", ":0", [], "is no address of a server without TLS"),
        ("x:1", "ftp://y", ":0", [], "is not an address"),
        ("x:1", "y:1", "z", [], "--listen: expected HOST:PORT"),
        ("x:1", "y:1", "z:99999", [], "--listen: expected HOST:PORT"),
        ("x:1", "y:1", ":0", ["A"], "expected --output NAME=RULE"),
        ("x:1", "y:1", ":0", ["A=near"], "Invalid enum value 'near'"),
    ],
)
def test_wrong_arguments(old: str, server: str, listen: str, output: list[str], text: str) -> None:
    with pytest.raises(BadOption, match=text):
        shadow_server(old, server, listen, ProxySettings(), output, 60, as_json=False)


def test_rules_of_outputs() -> None:
    assert rules_of(["A=top1", "B=ignore"])["A"].compare == "top1"
