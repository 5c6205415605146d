"""Requests of a known form are the requests that parsing makes, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kernel.serving.request import Request
from kernel.testing import RecordingSink
from protocols.http.codec import decode_infer
from protocols.http.compression import IDENTITY
from protocols.http.fast.prepared import PreparedBodies
from protocols.http.fast.request_head import InferHead

if TYPE_CHECKING:
    from kernel.serving.model import Model

MODEL: Model = object()  # type: ignore[assignment]  # forms only hand it back
SINK = RecordingSink()
DATA = bytes(range(12))


def body(*, first: bool = True, spaces: bool = True, **more: Any) -> tuple[InferHead, bytes]:
    """Return a request whose id, if `more` has one, stands first, or else last."""
    tensor = {"name": "A", "datatype": "UINT8", "shape": [12], "parameters": {"binary_data_size": 12}}
    document = {**more, "inputs": [tensor]} if first else {"inputs": [tensor], **more}
    text = json.dumps(document, separators=None if spaces else (",", ":")).encode()
    return InferHead("m", "", len(text), IDENTITY), text + DATA


def parsed(head: InferHead, octets: bytes) -> tuple[Request, Any]:
    request = Request(head.model, [], SINK, model_version=head.version)
    outputs = decode_infer(octets[: head.header_length], memoryview(octets)[head.header_length :], request, 1 << 20)
    return request, outputs


def remembering(head: InferHead, octets: bytes) -> PreparedBodies:
    forms = PreparedBodies()
    assert forms.find(head, octets, 1, SINK) is None
    request, outputs = parsed(head, octets)
    forms.remember(head, octets, outputs, request, MODEL)
    return forms


def facts(request: Request) -> object:
    inputs = [(t.name, t.datatype, list(t.shape), bytes(t.data or b""), t.client_span) for t in request.inputs]
    return inputs, request.id, request.parameters, request.priority, request.model_name, request.sink


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda octets: memoryview(bytearray(octets))])
@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("more", [{}, {"parameters": {"priority": 2, "custom": "x"}}])
def test_a_request_of_a_known_form_is_what_parsing_makes_of_it(more: dict[str, Any], spaces: bool, kind: type) -> None:
    head, octets = body(spaces=spaces, id="first", **more)
    forms = remembering(head, octets)
    again_head, again = body(spaces=spaces, id="another", **more)
    found = forms.find(again_head, kind(again), 1, SINK)
    assert found is not None
    assert facts(found[0]) == facts(parsed(again_head, again)[0])
    assert found[0].id == "another"
    assert found[1].common.model is MODEL


@pytest.mark.parametrize("id", ['quote"', "back\\slash", "ä", "line\n", ""])
def test_ids_that_json_escapes_are_part_of_the_form(id: str) -> None:
    head, octets = body(id=id)
    forms = remembering(head, octets)
    found = forms.find(head, octets, 1, SINK)
    if found is not None:
        assert facts(found[0]) == facts(parsed(head, octets)[0])
    assert forms.find(*body(id=id + "x"), 1, SINK) is None or id == ""


def test_an_id_that_stands_twice_is_left_to_the_parser() -> None:
    _, octets = body(id="first")
    text = octets[: -len(DATA)].replace(b'"inputs"', b'"id": "second", "inputs"')
    head = InferHead("m", "", len(text), IDENTITY)
    for _ in range(2):
        forms = remembering(head, text + DATA)
        found = forms.find(head, text.replace(b"first", b"third") + DATA, 1, SINK)
        assert found is None or found[0].id == "second"
        text = text.replace(b"second", b"first")
        head = InferHead("m", "", len(text), IDENTITY)


@pytest.mark.parametrize("first", ["", "a"])
@pytest.mark.parametrize("key", [b'"id"', b'"\\u0069d"'])
def test_a_second_id_counts_however_it_is_written(first: str, key: bytes) -> None:
    _, octets = body(id=first)
    text = octets[: -len(DATA)].replace(b'"inputs"', key + b': "%b", "inputs"' % first.encode())
    head = InferHead("m", "", len(text), IDENTITY)
    forms = remembering(head, text + DATA)
    other = text.replace(b'{"id": "%b"' % first.encode(), b'{"id": "b"')
    other_head = InferHead("m", "", len(other), IDENTITY)
    found = forms.find(other_head, other + DATA, 1, SINK)
    assert found is None or found[0].id == parsed(other_head, other + DATA)[0].id


def test_other_requests_are_parsed() -> None:
    head, octets = body()
    forms = remembering(head, octets)
    assert forms.find(head, octets + b"x", 1, SINK) is None
    assert forms.find(*body(priority=1), 1, SINK) is None
    assert forms.find(InferHead("n", "", head.header_length, IDENTITY), octets, 1, SINK) is None
    assert forms.find(InferHead("m", "1", head.header_length, IDENTITY), octets, 1, SINK) is None
    assert forms.find(head, octets, 1, SINK) is not None
    assert forms.find(head, octets, 2, SINK) is None, "the catalog has changed"
    assert forms.find(head, octets, 2, SINK) is None


def test_data_in_json_is_parsed() -> None:
    text = b'{"inputs": [{"name": "A", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]}'
    head = InferHead("m", "", len(text), IDENTITY)
    assert remembering(head, text).find(head, text, 1, SINK) is None
