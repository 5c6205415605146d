"""What typed decoders take of a request is what the careful ones take; they leave all that is wrong or unusual."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import ServingError
from kernel.serving.request import NO_SINK, Request
from protocols.http.inference.decoding import OutputFormat, decode_infer, decode_typed
from protocols.http.json.tensor import NeedsCare

LIMIT = 1 << 20


def typed(text: bytes, binary: bytes = b"") -> tuple[Request, OutputFormat]:
    request = Request("m", [], NO_SINK)
    return request, decode_typed(text, memoryview(binary), request, LIMIT)


def careful(text: bytes, binary: bytes = b"") -> tuple[Request, OutputFormat]:
    request = Request("m", [], NO_SINK)
    return request, decode_infer(text, memoryview(binary), request, LIMIT)


def shown(decoded: tuple[Request, OutputFormat]) -> object:
    request, outputs = decoded
    inputs = [(each.name, each.datatype, each.shape, bytes(each.data or b"")) for each in request.inputs]
    return inputs, request.id, request.parameters, request.outputs, outputs.binary, outputs.named


def infer(datatype: str, shape: str, data: str, before: str = "", after: str = "") -> bytes:
    one = f'{{"name":"X","datatype":"{datatype}","shape":{shape},"data":{data}{after}}}'
    return f'{{{before}"inputs":[{one}]}}'.encode()


GOOD = [
    infer("FP32", "[3]", "[1,2.5,-3e-5]"),
    infer("FP32", "[1,3]", "[[1,2.5,1e300]]"),
    infer("FP64", "[2]", " [ 1 , 2 ] ", '"id":"a",', ' ,"parameters":{}'),
    infer("INT64", "[2]", "[9223372036854775807,-1]"),
    infer("BOOL", "[2]", "[true,false]"),
    infer("BYTES", "[3]", '["","a]}\\"","\u00e9"]'),
    b'{"id":"data","inputs":[{"data":[1],"shape":[1],"datatype":"INT8","name":"data"}],"outputs":[{"name":"Y"}]}',
    b'{"parameters":{"x":"\\"data\\":[1"},"inputs":[{"name":"X","datatype":"INT8","shape":[1],"data":[7]}]}',
    b'{"inputs":[{"name":"X","datatype":"INT8","shape":[1],"data":[7]},'
    b'{"name":"Y","datatype":"INT8","shape":[2],"data":[8,9]}]}',
    b'{"inputs":[{"name":"X","datatype":"INT8","shape":[1],"data":[7],"data":[8]}]}',
]

CARE = [
    infer("FP32", "[1]", "[NaN]"),
    infer("FP32", "[1]", '["x"]'),
    infer("FP32", "[2]", "[1]"),
    infer("FP32", "[1]", "[1],[2]"),
    infer("FP32", "[0]", "[,,,]"),
    infer("FP32", "[1]", "[1 2]"),
    infer("FP32", "[1]", "[[[[[[[[[[1]]]]]]]]]]"),
    infer("INT8", "[1]", "[1.5]"),
    infer("UINT64", "[1]", "[-1]"),
    infer("INT64", "[1]", "[9223372036854775808]"),
    infer("FP16", "[1]", "[1]"),
    infer("X", "[1]", "[1]"),
    infer("FP32", '["x"]', "[1 2]"),
    infer("FP32", "[1]", "[1]", after=',"parameters":{"binary_data_size":4}'),
    b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[1]}]',
    b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[1]',
    b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1]}],"data":[1,,]}',
    b"[]",
    b"",
]


@pytest.mark.parametrize("text", GOOD)
def test_what_is_usual_is_decoded_as_by_the_careful_decoder(text: bytes) -> None:
    assert shown(typed(text)) == shown(careful(text))


@pytest.mark.parametrize("text", CARE)
def test_what_is_wrong_or_unusual_is_left_to_the_careful_decoder(text: bytes) -> None:
    with pytest.raises(NeedsCare):
        typed(text)


def test_bytes_that_belong_to_no_input_are_left_to_the_careful_decoder() -> None:
    with pytest.raises(NeedsCare):
        typed(GOOD[0], b"more")


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.text(max_size=3), st.none())
DATA = st.recursive(st.lists(NUMBERS, max_size=4), lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Requests, right and wrong ones, of which some have a character too many or too few."""
    one: dict[str, Any] = {"name": "X", "datatype": draw(st.sampled_from(["FP32", "INT8", "INT64", "BOOL", "BYTES"]))}
    one["shape"] = draw(st.lists(st.integers(0, 4), max_size=2))
    one["data"] = draw(DATA)
    keys = draw(st.permutations(list(one)))
    document = {"inputs": [{key: one[key] for key in keys}], "parameters": {"data": draw(DATA)}}
    text = json.dumps({key: document[key] for key in draw(st.permutations(list(document)))})
    if draw(st.booleans()):
        at = draw(st.integers(0, len(text)))
        text = (
            text[:at] + draw(st.sampled_from(["", ",", "]", "[", '"', "}", "1"])) + text[at + draw(st.integers(0, 1)) :]
        )
    return text.encode()


@settings(max_examples=500, deadline=None)
@given(texts())
def test_any_text_that_is_taken_gives_the_same_request(text: bytes) -> None:
    try:
        found = shown(typed(text))
    except NeedsCare:
        return
    try:
        expected = shown(careful(text))
    except ServingError as error:
        pytest.fail(f"only the careful decoder refuses it: {error}")
    assert found == expected
