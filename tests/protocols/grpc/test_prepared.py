"""A request made from a prepared one equals what parsing makes of its message, and no other message matches."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import ServingError
from kernel.serving.validation import validate
from kernel.testing import RecordingSink, model_spec
from protocols.grpc.codec import decode_request, parse_soon, start_request
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.prepared import PreparedMessages, model_of
from protocols.grpc.wire_format import first_raw_content

if TYPE_CHECKING:
    from kernel.serving.request import Request
    from kernel.serving.route import ModelRoute

SPEC = ModelSpec(
    "m",
    "",
    "test",
    0,
    {name: TensorSpec(name, kind, (-1,), (-1,)) for name, kind in (("A", "FP32"), ("B", "UINT8"), ("S", "BYTES"))},
    {"OUT": TensorSpec("OUT", "FP32", (-1,), (-1,))},
)
ROUTE = cast("ModelRoute", SimpleNamespace(spec=model_spec()))  # it is only returned
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
    found = parse_soon(octets)
    assert found is not None
    parts, contents = found
    request = start_request(parts, SINK, streaming=False)
    decode_request(parts, request, contents)
    return request


def prepared_from(*messages: pb.ModelInferRequest) -> PreparedMessages:
    prepared = PreparedMessages()
    assert prepared.match(None, b"", 1, SINK) is None
    for each in messages:
        octets = each.SerializeToString()
        prepared.add(octets, parsed(octets), ROUTE)
    return prepared


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
def test_a_request_from_a_prepared_one_equals_the_parsed_one(again: pb.ModelInferRequest, kind: type) -> None:
    prepared = prepared_from(message(), message(version="1", id="first"), message(priority=2, custom=5))
    octets = again.SerializeToString()
    found = prepared.match(None, kind(octets), 1, SINK)
    assert found is not None
    assert found[1].common.route is ROUTE
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
    assert prepared_from(message(), message(version="1")).match(None, other.SerializeToString(), 1, SINK) is None


def test_requests_in_shared_memory_have_references_of_their_own() -> None:
    made = message()
    del made.raw_input_contents[:]
    output = made.outputs.add(name="OUT")
    for parameters in (*(tensor.parameters for tensor in made.inputs), output.parameters):
        parameters["shared_memory_region"].string_param = "region"
        parameters["shared_memory_byte_size"].int64_param = 12
    octets = made.SerializeToString()
    prepared = prepared_from(made)
    first, second = (prepared.match(None, octets, 1, SINK) for _ in range(2))
    assert first is not None
    assert second is not None
    assert facts(first[0]) == facts(second[0]) == facts(parsed(octets))
    assert first[0].inputs[0] is not second[0].inputs[0]
    assert first[0].outputs[0] is not second[0].outputs[0]


def test_parameters_are_not_shared() -> None:
    prepared = prepared_from(message(custom=5))
    octets = message(custom=5).SerializeToString()
    first = prepared.match(None, octets, 1, SINK)
    assert first is not None
    first[0].parameters["more"] = 1
    second = prepared.match(None, octets, 1, SINK)
    assert second is not None
    assert second[0].parameters == {"custom": 5}


def test_a_change_of_the_catalog_drops_what_was_prepared() -> None:
    prepared = prepared_from(message())
    octets = message().SerializeToString()
    assert prepared.match(None, octets, 2, SINK) is None
    assert prepared.match(None, octets, 2, SINK) is None


@pytest.mark.parametrize("tail", [b"\x1a\x01x", b"\x0a\x01n", b"\x12\x019", b"\x3a\x00"])
def test_messages_with_a_field_twice_are_left_to_protobuf(tail: bytes) -> None:
    """The last of the two is valid, which here stands behind the id that would be cut out."""
    octets = message().SerializeToString()
    contents = sum(2 + len(content) for content in message().raw_input_contents)
    made = octets[:-contents] + tail + octets[-contents:]
    prepared = PreparedMessages()
    prepared.match(None, b"", 1, SINK)
    prepared.add(made, parsed(octets), ROUTE)
    assert prepared.match(None, made, 1, SINK) is None


def test_strings_and_typed_contents_are_parsed() -> None:
    strings = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"\1\0\0\0x"])
    strings.inputs.add(name="S", datatype="BYTES", shape=[1])
    typed = pb.ModelInferRequest(model_name="m")
    typed.inputs.add(name="A", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    prepared = prepared_from(strings, typed)
    assert prepared.match(None, strings.SerializeToString(), 1, SINK) is None
    assert prepared.match(None, typed.SerializeToString(), 1, SINK) is None


@given(st.data())
def test_a_changed_message_matches_only_what_it_really_is(data: st.DataObject) -> None:
    prepared = prepared_from(message(id="ab"), message(rows=5))
    octets = bytearray(message(id="cd", seed=9).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    found = prepared.match(None, bytes(octets), 1, SINK)
    if found is None:
        return
    request = parsed(bytes(octets))
    validate(request, SPEC_WITHOUT_STRINGS)
    assert facts(found[0]) == facts(request)


SPEC_WITHOUT_STRINGS = ModelSpec(
    "m", "", "test", 0, {name: SPEC.inputs[name] for name in ("A", "B")}, dict(SPEC.outputs)
)


@given(st.binary(max_size=60))
def test_any_bytes_can_be_matched_and_added(octets: bytes) -> None:
    prepared = prepared_from(message())
    assert prepared.match(None, octets, 1, SINK) is None
    try:
        request = parsed(message().SerializeToString())
    except ServingError:
        raise AssertionError from None
    prepared.add(octets, request, ROUTE)


@pytest.mark.parametrize(("octets", "found"), [
    (message(version="3").SerializeToString(), ("m", "3")),
    (message().SerializeToString(), ("m", "")),
    (b"\x0a\x01", None),
    (b"\x0a\x01\xff\x1a\x01x", None),
    (b"\x1a\x01x", None),
])  # fmt: skip
def test_the_model_is_read_from_the_first_bytes(octets: bytes, found: tuple[str, str] | None) -> None:
    assert model_of(octets) == found


def test_the_start_of_a_message_matches_an_earlier_message_of_its_size() -> None:
    octets = message(version="1", rows=700).SerializeToString()
    prepared = prepared_from(message(version="1", rows=700), message(version="1", rows=701))
    other = message(version="1", id="other", rows=700, seed=3).SerializeToString()
    for whole in (octets, other):
        matched = prepared.match_start(whole[:1024], len(whole), 1)
        assert matched is not None
        assert matched[0] is ROUTE
        assert matched == (ROUTE, first_raw_content(whole[:1024]))
    assert prepared.match_start(octets[:1024], len(octets) + 1, 1) is None
    assert prepared.match_start(octets[:30], len(octets), 1) is None
    assert prepared.match_start(octets[:1024], len(octets), 2) is None
    assert prepared.match_start(message(rows=700).SerializeToString()[:1024], len(octets), 1) is None
    assert prepared.match_start(b"", len(octets), 1) is None


def test_contents_behind_an_input_in_shared_memory_are_the_first() -> None:
    made = message(rows=700)
    made.inputs.insert(0, pb.ModelInferRequest.InferInputTensor(name="B", datatype="UINT8", shape=[700]))
    made.inputs[0].parameters["shared_memory_region"].string_param = "region"
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 700
    del made.inputs[2], made.raw_input_contents[1]
    octets = made.SerializeToString()
    matched = prepared_from(made).match_start(octets[:1024], len(octets), 1)
    assert matched == (ROUTE, first_raw_content(octets[:1024]))
