"""Prepared requests are the requests that parsing makes, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kernel.serving.request import Request
from kernel.testing import RecordingSink
from protocols.http.inference.compression import GZIP, IDENTITY
from protocols.http.inference.decoding import decode_infer
from protocols.http.inference.prepared import InferRequestHead, PreparedBodies
from protocols.http.inference.response_templates import JsonResponseTemplate, ResponseTemplate

if TYPE_CHECKING:
    from kernel.serving.route import ModelRoute

ROUTE: ModelRoute = object()  # type: ignore[assignment]  # prepared bodies only hand it back
SINK = RecordingSink()
DATA = bytes(range(12))


def infer_head(
    name: str, version: str, header_length: int, encoding: str = IDENTITY, response_headers: bytes = b""
) -> InferRequestHead:
    return InferRequestHead(
        ROUTE, name, version, "/", header_length + 12, header_length, encoding, response_headers=response_headers
    )


def body(*, first: bool = True, spaces: bool = True, **more: Any) -> tuple[InferRequestHead, bytes]:
    """Return a request whose id, if `more` has one, stands first, or else last."""
    tensor = {"name": "A", "datatype": "UINT8", "shape": [12], "parameters": {"binary_data_size": 12}}
    document = {**more, "inputs": [tensor]} if first else {"inputs": [tensor], **more}
    text = json.dumps(document, separators=None if spaces else (",", ":")).encode()
    return infer_head("m", "", len(text)), text + DATA


def parsed(head: InferRequestHead, octets: bytes) -> tuple[Request, Any]:
    request = Request(head.model_name, [], SINK, model_version=head.model_version)
    outputs = decode_infer(octets[: head.header_length], memoryview(octets)[head.header_length :], request, 1 << 20)
    return request, outputs


def remembering(head: InferRequestHead, octets: bytes) -> PreparedBodies:
    bodies = PreparedBodies(1 << 20)
    assert bodies.match(head, octets, 1, SINK) is None
    request, outputs = parsed(head, octets)
    bodies.add(head, octets, outputs, request, ROUTE)
    return bodies


def facts(request: Request) -> object:
    inputs = [(t.name, t.datatype, list(t.shape), bytes(t.data or b""), t.client_span) for t in request.inputs]
    return inputs, request.id, request.parameters, request.priority, request.model_name, request.sink


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda octets: memoryview(bytearray(octets))])
@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("more", [{}, {"parameters": {"priority": 2, "custom": "x"}}])
def test_a_prepared_request_is_what_parsing_makes_of_it(more: dict[str, Any], spaces: bool, kind: type) -> None:
    head, octets = body(spaces=spaces, id="first", **more)
    bodies = remembering(head, octets)
    again_head, again = body(spaces=spaces, id="another", **more)
    found = bodies.match(again_head, kind(again), 1, SINK)
    assert found is not None
    assert facts(found[0]) == facts(parsed(again_head, again)[0])
    assert found[0].id == "another"
    assert found[1].common.route is ROUTE


@pytest.mark.parametrize("id", ['quote"', "back\\slash", "ä", "line\n", ""])
def test_ids_that_json_escapes_are_part_of_what_is_looked_up(id: str) -> None:
    head, octets = body(id=id)
    bodies = remembering(head, octets)
    found = bodies.match(head, octets, 1, SINK)
    if found is not None:
        assert facts(found[0]) == facts(parsed(head, octets)[0])
    assert bodies.match(*body(id=id + "x"), 1, SINK) is None or id == ""


def test_an_id_that_stands_twice_is_left_to_the_parser() -> None:
    _, octets = body(id="first")
    text = octets[: -len(DATA)].replace(b'"inputs"', b'"id": "second", "inputs"')
    head = infer_head("m", "", len(text))
    for _ in range(2):
        bodies = remembering(head, text + DATA)
        found = bodies.match(head, text.replace(b"first", b"third") + DATA, 1, SINK)
        assert found is None or found[0].id == "second"
        text = text.replace(b"second", b"first")
        head = infer_head("m", "", len(text))


@pytest.mark.parametrize("first", ["", "a"])
@pytest.mark.parametrize("key", [b'"id"', b'"\\u0069d"'])
def test_a_second_id_counts_however_it_is_written(first: str, key: bytes) -> None:
    _, octets = body(id=first)
    text = octets[: -len(DATA)].replace(b'"inputs"', key + b': "%b", "inputs"' % first.encode())
    head = infer_head("m", "", len(text))
    bodies = remembering(head, text + DATA)
    other = text.replace(b'{"id": "%b"' % first.encode(), b'{"id": "b"')
    other_head = infer_head("m", "", len(other))
    found = bodies.match(other_head, other + DATA, 1, SINK)
    assert found is None or found[0].id == parsed(other_head, other + DATA)[0].id


def test_other_requests_are_parsed() -> None:
    head, octets = body()
    bodies = remembering(head, octets)
    assert bodies.match(head, octets + b"x", 1, SINK) is None
    assert bodies.match(*body(priority=1), 1, SINK) is None
    assert bodies.match(infer_head("n", "", head.header_length), octets, 1, SINK) is None
    assert bodies.match(infer_head("m", "1", head.header_length), octets, 1, SINK) is None
    assert bodies.match(head, octets, 1, SINK) is not None
    assert bodies.match(head, octets, 2, SINK) is None, "the catalog has changed"
    assert bodies.match(head, octets, 2, SINK) is None


def test_heads_share_a_prepared_body_only_where_responses_are_written_alike() -> None:
    head, octets = body(parameters={"binary_data_output": True})
    bodies = remembering(head, octets)
    length = head.header_length
    assert bodies.match(infer_head("m", "", length, GZIP), octets, 1, SINK) is None
    assert bodies.match(infer_head("m", "", length, response_headers=b"Vary: Origin\r\n"), octets, 1, SINK) is None
    found = bodies.match(infer_head("m", "", length), octets, 1, SINK)
    assert found is not None
    assert found[1].template is not None


def test_compressed_responses_have_no_template() -> None:
    _, octets = body(parameters={"binary_data_output": True})
    head = infer_head("m", "", len(octets) - len(DATA), GZIP)
    found = remembering(head, octets).match(head, octets, 1, SINK)
    assert found is not None
    assert found[1].template is None


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, JsonResponseTemplate),
        ({"parameters": {"binary_data_output": True}}, ResponseTemplate),
        ({"outputs": [{"name": "X", "parameters": {"binary_data": True}}, {"name": "Y"}]}, ResponseTemplate),
        ({"outputs": [{"name": "X"}]}, JsonResponseTemplate),
        (
            {"outputs": [{"name": "X", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}}]},
            ResponseTemplate,
        ),
    ],
)
def test_the_template_is_that_for_binary_or_that_for_json_outputs(more: dict[str, Any], kind: type) -> None:
    head, octets = body(**more)
    found = remembering(head, octets).match(head, octets, 1, SINK)
    assert found is not None
    assert type(found[1].template) is kind


def test_a_limited_number_of_bodies_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.http.inference.prepared.MAX_BODIES", 2)
    bodies = PreparedBodies(1 << 20)
    for priority in range(5):
        head, octets = body(parameters={"priority": priority})
        bodies.match(head, octets, 1, SINK)
        request, outputs = parsed(head, octets)
        bodies.add(head, octets, outputs, request, ROUTE)
        assert bodies.match(head, octets, 1, SINK) is not None
        assert len(bodies._cache.entries) <= 2
