"""Requests of a known form are the requests that parsing makes, and nothing else is taken for one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import ServingError
from kernel.serving.validation import validate
from kernel.testing import RecordingSink
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.messages.codec import decode_request, parse_request, start_request
from protocols.grpc.messages.prepared import PreparedMessages, model_of
from protocols.grpc.messages.raw import first_raw_content

if TYPE_CHECKING:
    from kernel.serving.model import Model
    from kernel.serving.request import Request

SPEC = ModelSpec(
    "m",
    "",
    "test",
    0,
    {name: TensorSpec(name, kind, (-1,), (-1,)) for name, kind in (("A", "FP32"), ("B", "UINT8"), ("S", "BYTES"))},
    {"OUT": TensorSpec("OUT", "FP32", (-1,), (-1,))},
)
MODEL: Model = object()  # type: ignore[assignment]  # forms only hand it back
SINK = RecordingSink()


def message(*, id: str = "", version: str = "", rows: int = 3, seed: int = 0, **more: object) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="m", model_version=version, id=id)
    random.seed(seed)
    for name, datatype, size in (("A", "FP32", 4), ("B", "UINT8", 1)):
        made.inputs.add(name=name, datatype=datatype, shape=[rows])
        made.raw_input_contents.append(random.randbytes(rows * size))
    for key, value in more.items():
        made.parameters[key].int64_param = value  # type: ignore[assignment]
    return made


def parsed(octets: bytes) -> Request:
    parts, contents = parse_request(octets)
    request = start_request(parts, SINK, streaming=False)
    decode_request(parts, request, contents)
    return request


def remembering(*messages: pb.ModelInferRequest) -> PreparedMessages:
    forms = PreparedMessages()
    assert forms.find(b"", 1, SINK) is None
    for each in messages:
        octets = each.SerializeToString()
        forms.remember(octets, parsed(octets), MODEL)
    return forms


def facts(request: Request) -> object:
    inputs = [(t.name, t.datatype, list(t.shape), bytes(t.data or b""), t.client_span) for t in request.inputs]
    outputs = [(o.name, o.classification, o.client_span) for o in request.outputs]
    own = (request.model_name, request.model_version, request.id, request.priority, request.parameters)
    return inputs, outputs, own, request.timeout_us, request.correlation_id


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda octets: memoryview(bytearray(octets))])
@pytest.mark.parametrize(
    "again",
    [
        message(seed=1),
        message(seed=2, id="7"),
        message(seed=3, id="ä" * 60),
        message(seed=4, version="1"),
        message(seed=5, version="1", id="x"),
        message(seed=6, priority=2, custom=5),
    ],
)
def test_a_request_of_a_known_form_is_what_parsing_makes_of_it(again: pb.ModelInferRequest, kind: type) -> None:
    forms = remembering(message(), message(version="1", id="first"), message(priority=2, custom=5))
    octets = again.SerializeToString()
    found = forms.find(kind(octets), 1, SINK)
    assert found is not None
    assert found[1].common.model is MODEL
    assert facts(found[0]) == facts(parsed(octets))
    assert found[0].sink is SINK


@pytest.mark.parametrize(
    "other",
    [
        message(rows=4),
        message(version="2"),
        message(id="x" * 128),
        message(priority=3),
        pb.ModelInferRequest(model_name="n"),
        pb.ModelInferRequest(model_name="m"),
        pb.ModelInferRequest(),
    ],
)
def test_other_requests_are_parsed(other: pb.ModelInferRequest) -> None:
    assert remembering(message(), message(version="1")).find(other.SerializeToString(), 1, SINK) is None


def test_requests_in_shared_memory_have_references_of_their_own() -> None:
    made = message()
    del made.raw_input_contents[:]
    output = made.outputs.add(name="OUT")
    for parameters in (*(tensor.parameters for tensor in made.inputs), output.parameters):
        parameters["shared_memory_region"].string_param = "region"
        parameters["shared_memory_byte_size"].int64_param = 12
    octets = made.SerializeToString()
    forms = remembering(made)
    first, second = (forms.find(octets, 1, SINK) for _ in range(2))
    assert first is not None
    assert second is not None
    assert facts(first[0]) == facts(second[0]) == facts(parsed(octets))
    assert first[0].inputs[0] is not second[0].inputs[0]
    assert first[0].outputs[0] is not second[0].outputs[0]


def test_parameters_are_not_shared() -> None:
    forms = remembering(message(custom=5))
    octets = message(custom=5).SerializeToString()
    first = forms.find(octets, 1, SINK)
    assert first is not None
    first[0].parameters["more"] = 1
    second = forms.find(octets, 1, SINK)
    assert second is not None
    assert second[0].parameters == {"custom": 5}


def test_another_catalog_forgets_all_forms() -> None:
    forms = remembering(message())
    octets = message().SerializeToString()
    assert forms.find(octets, 2, SINK) is None
    assert forms.find(octets, 2, SINK) is None


@pytest.mark.parametrize("tail", [b"\x1a\x01x", b"\x0a\x01n", b"\x12\x019", b"\x3a\x00"])
def test_fields_that_stand_twice_are_left_to_protobuf(tail: bytes) -> None:
    """The last of two counts, which here stands behind the id that would be taken out."""
    octets = message().SerializeToString()
    contents = sum(2 + len(content) for content in message().raw_input_contents)
    made = octets[:-contents] + tail + octets[-contents:]
    forms = PreparedMessages()
    forms.find(b"", 1, SINK)
    forms.remember(made, parsed(octets), MODEL)
    assert forms.find(made, 1, SINK) is None


def test_strings_and_typed_contents_are_parsed() -> None:
    strings = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"\1\0\0\0x"])
    strings.inputs.add(name="S", datatype="BYTES", shape=[1])
    typed = pb.ModelInferRequest(model_name="m")
    typed.inputs.add(name="A", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    forms = remembering(strings, typed)
    assert forms.find(strings.SerializeToString(), 1, SINK) is None
    assert forms.find(typed.SerializeToString(), 1, SINK) is None


@given(st.data())
def test_a_changed_message_is_never_taken_for_what_it_is_not(data: st.DataObject) -> None:
    forms = remembering(message(id="ab"), message(rows=5))
    octets = bytearray(message(id="cd", seed=9).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    found = forms.find(bytes(octets), 1, SINK)
    if found is None:
        return
    request = parsed(bytes(octets))
    validate(request, SPEC_WITHOUT_STRINGS)
    assert facts(found[0]) == facts(request)


SPEC_WITHOUT_STRINGS = ModelSpec(
    "m", "", "test", 0, {name: SPEC.inputs[name] for name in ("A", "B")}, dict(SPEC.outputs)
)


@given(st.binary(max_size=60))
def test_no_bytes_break_it(octets: bytes) -> None:
    forms = remembering(message())
    assert forms.find(octets, 1, SINK) is None
    try:
        request = parsed(message().SerializeToString())
    except ServingError:
        raise AssertionError from None
    forms.remember(octets, request, MODEL)


@pytest.mark.parametrize(("octets", "found"), [
    (message(version="3").SerializeToString(), ("m", "3")),
    (message().SerializeToString(), ("m", "")),
    (b"\x0a\x01", None),
    (b"\x0a\x01\xff\x1a\x01x", None),
    (b"\x1a\x01x", None),
])  # fmt: skip
def test_the_model_is_read_off_the_first_bytes(octets: bytes, found: tuple[str, str] | None) -> None:
    assert model_of(octets) == found


def test_a_message_that_begins_like_an_earlier_one_of_its_size_is_known_by_its_begin() -> None:
    octets = message(version="1", rows=700).SerializeToString()
    forms = remembering(message(version="1", rows=700), message(version="1", rows=701))
    other = message(version="1", id="other", rows=700, seed=3).SerializeToString()
    for begin in (octets, other):
        announced = forms.announced(begin[:1024], len(begin), 1)
        assert announced is not None
        assert announced[0] is MODEL
        assert announced == (MODEL, first_raw_content(begin[:1024]))
    assert forms.announced(octets[:1024], len(octets) + 1, 1) is None
    assert forms.announced(octets[:30], len(octets), 1) is None
    assert forms.announced(octets[:1024], len(octets), 2) is None
    assert forms.announced(message(rows=700).SerializeToString()[:1024], len(octets), 1) is None
    assert forms.announced(b"", len(octets), 1) is None


def test_contents_behind_an_input_in_shared_memory_are_the_first() -> None:
    made = message(rows=700)
    made.inputs.insert(0, pb.ModelInferRequest.InferInputTensor(name="B", datatype="UINT8", shape=[700]))
    made.inputs[0].parameters["shared_memory_region"].string_param = "region"
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 700
    del made.inputs[2], made.raw_input_contents[1]
    octets = made.SerializeToString()
    announced = remembering(made).announced(octets[:1024], len(octets), 1)
    assert announced == (MODEL, first_raw_content(octets[:1024]))
