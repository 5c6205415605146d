"""Bodies with data in JSON are recognised by the text around the data, and read as parsing reads them."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from kernel.serving.request import REQUEST_BYTE_SIZE, Request
from kernel.testing import RecordingSink
from protocols.http.inference.decoding import decode_infer
from protocols.http.inference.prepared import InferRequestHead, PreparedBodies
from shm.tensor import ClientSpan

if TYPE_CHECKING:
    from kernel.serving.route import ModelRoute

ROUTE: ModelRoute = object()  # type: ignore[assignment]  # prepared bodies only hand it back
SINK = RecordingSink()
LIMIT = 1 << 20


def tensor(data: str, datatype: str = "INT32", shape: str = "[2]", name: str = "A", more: str = "") -> str:
    return f'{{"name": "{name}", "datatype": "{datatype}", "shape": {shape}, "data": {data}{more}}}'


def body(*tensors: str, before: str = "", behind: str = "") -> bytes:
    return f'{{{before}"inputs": [{", ".join(tensors)}]{behind}}}'.encode()


def head(text: bytes, header_length: int | None = None) -> InferRequestHead:
    return InferRequestHead(ROUTE, "m", "", "/", len(text), len(text) if header_length is None else header_length, "")


def parsed(text: bytes) -> tuple[Request, Any]:
    request = Request("m", [], SINK)
    return request, decode_infer(text, memoryview(b""), request, LIMIT)


def facts(request: Request) -> object:
    inputs = [(t.name, t.datatype, list(t.shape), t.data, t.client_span) for t in request.inputs]
    outputs = [(o.name, o.classification, o.client_span) for o in request.outputs]
    return inputs, outputs, request.id, request.parameters, request.priority, request.correlation_id


def remembering(*texts: bytes, limit: int = LIMIT) -> PreparedBodies:
    bodies = PreparedBodies(limit)
    for text in texts:
        assert bodies.match(head(text), text, 1, SINK) is None
        request, outputs = parsed(text)
        bodies.add(head(text), text, outputs, request, ROUTE)
    return bodies


def match(bodies: PreparedBodies, text: bytes) -> Request | None:
    found = bodies.match(head(text), text, 1, SINK)
    return None if found is None else found[0]


def check_recognised(first: bytes, other: bytes) -> None:
    for text in (first, other):
        request = match(remembering(first), text)
        assert request is not None
        assert facts(request) == facts(parsed(text)[0])


@pytest.mark.parametrize(
    ("datatype", "first", "other"),
    [
        ("BOOL", "[true, false]", "[false,false]"),
        ("UINT8", "[1, 2]", "[0, 255]"),
        ("INT8", "[1, 2]", "[-128, 127]"),
        ("UINT16", "[1, 2]", "[0, 65535]"),
        ("INT32", "[1, 2]", "[-2147483648, 2147483647]"),
        ("INT64", "[1, 2]", "[-9223372036854775808, 9223372036854775807]"),
        ("UINT64", "[1, 2]", "[0, 18446744073709551615]"),
        ("FP32", "[1, 2.5]", "[-0.0, 3.4028234663852886e38]"),
        ("FP64", "[1, 2.5]", "[5e-324, 1.7976931348623157e308]"),
        ("BYTES", '["a", "b"]', '["", "\\u00e4]}\\"data\\": [1]"]'),
    ],
)
def test_the_data_of_every_datatype_is_read(datatype: str, first: str, other: str) -> None:
    check_recognised(body(tensor(first, datatype)), body(tensor(other, datatype)))


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (body(tensor("[1, 2]"), tensor("[3, 4]", name="B")), body(tensor("[-5, 6]"), tensor("[777, 8]", name="B"))),
        (body(tensor("[[1], [2]]", shape="[2, 1]")), body(tensor("[[30], [ 4]]", shape="[2, 1]"))),
        (body(tensor("[1, 2]"), before='"id": "x", '), body(tensor("[1, 3]"), before='"id": "longer", ')),
        (body(tensor("[1, 2]"), before='"id": "x", '), body(tensor("[1, 3]"), before='"id": "", ')),
        (body(tensor("[1, 2]"), behind=', "id":"x"'), body(tensor("[1, 3]"), behind=', "id":"\\u0022 longer"')),
        (body(tensor("[2, 2]")), body(tensor("  [ 1\n,\t3 ]"))),
        (
            body(tensor("[1, 2]"), behind=', "outputs": [{"name": "B"}], "parameters": {"priority": 2}'),
            body(tensor("[1, 3]"), behind=', "outputs": [{"name": "B"}], "parameters": {"priority": 2}'),
        ),
        (
            body(tensor("[1, 2]", more=', "parameters": {"x": 1}')),
            body(tensor("[1, 3]", more=', "parameters": {"x": 1}')),
        ),
        (body(tensor('["data"]', "BYTES", "[1]", "data")), body(tensor('["x"]', "BYTES", "[1]", "data"))),
    ],
)
def test_bodies_that_differ_in_data_and_id_are_recognised(first: bytes, other: bytes) -> None:
    check_recognised(first, other)


@pytest.mark.parametrize(
    "data",
    [
        "[1]", "[1, 2, 3]", "[]", "[1.0, 2]", "[1, 2147483648]", "[1, NaN]", "[true, 2]", '["1", 2]', "[[1, 2]]",
        "[1, 2", "[1, 2]]", "[1, 2], 3", "null", "[1, null]", "12", "[01, 2]", "[1, 2,]", '[1, 2], "data": [3, 4]',
        "[1, 2]\0", "{}", "",
    ],
)  # fmt: skip
def test_other_data_is_left_to_the_parser(data: str) -> None:
    assert match(remembering(body(tensor("[1, 2]"))), body(tensor(data))) is None


def test_data_that_overlaps_with_the_text_around_it_is_left_to_the_parser() -> None:
    text = body(tensor("[1, 2]"))
    bodies = remembering(text)
    for cut in range(len(text)):
        assert match(bodies, text[:cut]) is None


@pytest.mark.parametrize(
    "text",
    [
        body(tensor("[1, 2]", more=', "data": [1, 2]')),
        body(tensor("[]", shape="[0]")),
        body(tensor("[NaN, 2]", "FP32")),
        body(tensor("[[[[[[[[[1, 2]]]]]]]]]")),
        body(tensor("[1, 2]"), before='"id": "x", ', behind=', "id": "x"'),
        body(tensor("[1, 2]"), before='"id": "x", ', behind=', "i\\u0064": "x"'),
        body(tensor("[1, 2]"), behind=', "parameters": {"long": "%s"}' % ("x" * 3000)),
    ],
)
def test_bodies_in_which_the_data_or_id_is_not_beyond_doubt_are_parsed_each_time(text: bytes) -> None:
    bodies = PreparedBodies(LIMIT)
    bodies.match(head(text), text, 1, SINK)
    request, outputs = parsed(text)
    bodies.add(head(text), text, outputs, request, ROUTE)
    found = match(bodies, text)
    assert found is None or facts(found) == facts(request)
    assert match(bodies, text.replace(b'"x"', b'"y"', 1).replace(b"[1, 2]", b"[1, 3]", 1)) is None


def test_the_last_of_two_members_with_data_counts() -> None:
    first = body(tensor("[1, 2]", more=', "data": [3, 4]'))
    found = match(remembering(first), first.replace(b"[3, 4]", b"[5, 6]"))
    assert found is None or found.inputs[0].data == struct.pack("<2i", 5, 6)


def test_an_id_before_the_data_that_is_not_in_front_is_part_of_what_is_looked_up() -> None:
    text = body(tensor("[1, 2]"), before='"x": 1, "id": "a", ')
    bodies = remembering(text)
    found = match(bodies, text)
    assert found is not None
    assert found.id == "a"
    assert match(bodies, text.replace(b'"a"', b'"b"')) is None


def test_tensors_in_regions_of_the_client_stand_in_their_place() -> None:
    region = '{"shared_memory_region": "r", "shared_memory_byte_size": 8}'
    tensors = [f'{{"name": "{name}", "datatype": "INT32", "shape": [2], "parameters": {region}}}' for name in "AC"]
    first = body(tensors[0], tensor("[1, 2]", name="B"), tensors[1])
    found = match(remembering(first), first.replace(b"[1, 2]", b"[3, 4]"))
    assert found is not None
    assert [each.name for each in found.inputs] == ["A", "B", "C"]
    assert [each.client_span for each in found.inputs] == [ClientSpan("r", 8), None, ClientSpan("r", 8)]


def test_strings_count_with_their_length_and_are_limited() -> None:
    def text(length: int) -> bytes:
        return body(tensor(json.dumps(["x" * length]), "BYTES", "[1]"))

    found = match(remembering(text(1)), text(1000))
    assert found is not None
    assert found.byte_size == REQUEST_BYTE_SIZE + 1004
    assert match(remembering(text(1)), text(5000)) is None, "too long for a message to the worker"
    assert match(remembering(text(1), limit=100), text(97)) is None


def test_a_thousand_numbers_are_recognised() -> None:
    texts = [body(tensor(json.dumps([each / 7e5 + 1 / 3] * 1024), "FP32", "[1024]")) for each in (1, 2)]
    assert min(map(len, texts)) > 16 << 10
    check_recognised(*texts)


def test_many_strings_are_left_to_the_parser() -> None:
    texts = [body(tensor(json.dumps([each] * 5000), "BYTES", "[5000]")) for each in ("a", "b")]
    assert 16 << 10 < len(texts[1]) < 32 << 10
    assert match(remembering(texts[0]), texts[1]) is None


def test_skeletons_that_begin_alike_are_told_apart() -> None:
    texts = [body(tensor("[1, 2]"), behind=f', "parameters": {{"priority": {priority}}}') for priority in (1, 2, 3, 4)]
    bodies = remembering(*texts)
    for priority, text in enumerate(texts, 1):
        found = match(bodies, text)
        assert found is not None
        assert found.priority == priority


def test_clients_that_never_repeat_themselves_do_not_fill_the_memory() -> None:
    bodies = PreparedBodies(LIMIT)
    bodies.match(head(b""), b"", 1, SINK)
    for number in range(200):
        text = body(tensor("[1, 2]"), before=f'"parameters": {{"sequence_id": {number + 1}}}, ')
        request, outputs = parsed(text)
        bodies.add(head(text), text, outputs, request, ROUTE)
    assert len(bodies.json.cache.entries) == 72


def test_a_body_that_is_partly_binary_is_parsed() -> None:
    binary = '{"name": "B", "datatype": "UINT8", "shape": [0], "parameters": {"binary_data_size": 0}}'
    assert match(remembering(body(tensor("[1, 2]"), binary)), body(tensor("[1, 2]"), binary)) is None
