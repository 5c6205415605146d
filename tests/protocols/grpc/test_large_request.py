"""Large request messages: the same request as protobuf makes of them, without objects of their elements."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import InvalidArgument, NoMemory, ServingError
from kernel.serving.request import NO_SINK
from protocols.grpc import large_request
from protocols.grpc.codec import decode_request, start_request
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.large_request import (
    DecodeMessageArguments,
    OtherField,
    TooManyElements,
    are_strings,
    decode_message_task,
    parse_large_request,
    write_strings,
)
from protocols.grpc.wire_format import varint
from protocols.large_requests import read_description, read_sizes
from shm.datatypes import encode_strings

Message = pb.ModelInferRequest


def tensor(datatype: str, shape: list[int], **contents: Any) -> pb.ModelInferRequest.InferInputTensor:
    made = Message.InferInputTensor(name="IN", datatype=datatype, shape=shape)
    if contents:
        made.contents.CopyFrom(pb.InferTensorContents(**contents))
    return made


def decoded(octets: bytes) -> tuple[list[bytes | None], Any]:
    """Decode as a helper does; returns the bytes of the inputs and the description."""
    arguments = msgspec.msgpack.encode(DecodeMessageArguments(False))
    steps = decode_message_task(arguments, [memoryview(octets)])
    described = read_description(next(steps))
    memory = memoryview(bytearray(described.byte_size))
    with pytest.raises(StopIteration) as stop:
        steps.send(memory)
    found: list[bytes | None] = []
    position = 0
    for each, most, size in zip(
        described.inputs, described.byte_sizes, read_sizes(stop.value.value.message), strict=True
    ):
        found.append(None if each.client_span is not None else bytes(memory[position : position + size]))
        position += -(-most // 64) * 64
    return found, described


def as_protobuf(octets: bytes) -> list[bytes]:
    message = Message.FromString(octets)
    request = start_request(message, NO_SINK, streaming=False)
    decode_request(message, request)
    return [bytes(each.data or b"") for each in request.inputs]


VALUES = {
    "BOOL": ("bool_contents", st.booleans()),
    "INT8": ("int_contents", st.integers(-128, 127)),
    "INT32": ("int_contents", st.integers(-(2**31), 2**31 - 1)),
    "UINT16": ("uint_contents", st.integers(0, 2**16 - 1)),
    "UINT64": ("uint64_contents", st.integers(0, 2**64 - 1)),
    "FP32": ("fp32_contents", st.floats(width=32, allow_nan=False)),
    "BYTES": ("bytes_contents", st.binary(max_size=300)),
}


@pytest.mark.parametrize("small", [0, 4096])
@given(st.data())
def test_typed_contents_become_what_they_become_without_a_helper(small: int, data: st.DataObject) -> None:
    inputs = []
    for datatype in data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4)):
        field, values = VALUES[datatype]
        elements = data.draw(st.lists(values, min_size=1, max_size=30))
        inputs.append(tensor(datatype, [len(elements)], **{field: elements}))
    octets = Message(model_name="m", id="1", inputs=inputs).SerializeToString()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_request, "SMALL_BYTE_SIZE", small)
        assert decoded(octets)[0] == as_protobuf(octets)


def test_raw_contents_and_typed_contents_belong_to_their_inputs() -> None:
    named = tensor("FP32", [4])
    named.parameters["shared_memory_region"].string_param = "r"
    named.parameters["shared_memory_byte_size"].int64_param = 16
    octets = Message(
        model_name="m",
        model_version="3",
        inputs=[named, tensor("BYTES", [2000], bytes_contents=[b"abc"] * 2000)],
    ).SerializeToString()
    (first, second), described = decoded(octets)
    assert (first, second) == (None, encode_strings([b"abc"] * 2000))
    assert (described.model_name, described.model_version) == ("m", "3")
    octets = Message(
        model_name="m", inputs=[tensor("FP32", [2000]), tensor("UINT8", [3])], raw_input_contents=[bytes(8000), b"abc"]
    ).SerializeToString()
    assert decoded(octets)[0] == [bytes(8000), b"abc"]


def test_contents_in_several_parts_are_joined() -> None:
    parts = [tensor("BYTES", [600], bytes_contents=[b"%d" % index] * 300) for index in range(2)]
    joined = (
        parts[0].SerializeToString()
        + pb.ModelInferRequest.InferInputTensor(contents=parts[1].contents).SerializeToString()
    )
    octets = b"\n\x01m" + b"\x2a" + varint(len(joined)) + joined
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_request, "SMALL_BYTE_SIZE", 0)
        assert decoded(octets)[0] == as_protobuf(octets) == [encode_strings([b"0"] * 300 + [b"1"] * 300)]


@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        (b"\x22\x00" * 600, InvalidArgument, "too many parameters, expected at most 512"),
        (b"\x2a\x00" * 600, InvalidArgument, "too many inputs, expected at most 512"),
        (b"\x32\x00" * 600, InvalidArgument, "too many outputs, expected at most 512"),
        (b"\x3a\x00" * 600, InvalidArgument, "too many raw input contents, expected at most 512"),
        (b"\xa2\x06\x02ab" * 300_000, InvalidArgument, "take too many bytes, expected at most 1048576"),
        (tensor("FP32", [1] * 600).SerializeToString(), InvalidArgument, "too many dimensions of a shape"),
    ],
)
def test_too_many_parts_are_refused(message: bytes, kind: type[ServingError], said: str) -> None:
    if message[:1] == b"\n":  # an input
        message = b"\x2a" + varint(len(message)) + message
    with pytest.raises(kind, match=said):
        decoded(b"\n\x01m" + message)


def test_an_input_with_too_long_a_description_is_refused() -> None:
    made = tensor("FP32", [1])
    made.parameters["p"].string_param = "x" * (1 << 20)
    with pytest.raises(InvalidArgument, match="names, shapes and parameters of the request take too many bytes"):
        parse_large_request(Message(inputs=[made]).SerializeToString())


def test_typed_contents_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_request, "MAX_TYPED_BYTE_SIZE", 8000)
    octets = Message(inputs=[tensor("FP32", [2001], fp32_contents=[0.0] * 2001)]).SerializeToString()
    with pytest.raises(NoMemory, match="typed contents of 80.. bytes for an input, expected at most 8000: send it"):
        parse_large_request(octets)


def test_strings_beyond_the_shape_are_refused_before_all_are_decoded() -> None:
    octets = Message(model_name="m", id="7", inputs=[tensor("BYTES", [2], bytes_contents=[b""] * 5000)])
    with pytest.raises(InvalidArgument) as raised:
        decoded_to_the_end(octets.SerializeToString())
    assert raised.value.message == (
        "[request id: 7] unexpected number of string elements 3 for inference input 'IN' for model 'm', expecting 2"
    )


def test_strings_and_numbers_together_are_refused() -> None:
    octets = Message(
        model_name="m", inputs=[tensor("BYTES", [9000], bytes_contents=[b"a"] * 5000, fp32_contents=[1.0])]
    ).SerializeToString()
    with pytest.raises(InvalidArgument, match="of type 'FP32', expected datatype 'BYTES'|already supplied"):
        decoded_to_the_end(octets)
    # Strings first: protobuf accepts fields in any order.
    contents = pb.InferTensorContents(bytes_contents=[b"a"] * 5000).SerializeToString()
    contents += pb.InferTensorContents(fp32_contents=[1.0]).SerializeToString()
    made = tensor("BYTES", [9000]).SerializeToString() + b"\x2a" + varint(len(contents)) + contents
    with pytest.raises(InvalidArgument, match="binary data was already supplied"):
        decoded_to_the_end(b"\n\x01m\x2a" + varint(len(made)) + made)


def test_strings_into_another_datatype_are_refused() -> None:
    octets = Message(model_name="m", inputs=[tensor("FP32", [5000], bytes_contents=[b"a"] * 5000)])
    with pytest.raises(InvalidArgument, match="of type 'BYTES', expected datatype 'FP32'"):
        decoded(octets.SerializeToString())


def decoded_to_the_end(octets: bytes) -> None:
    steps = decode_message_task(msgspec.msgpack.encode(DecodeMessageArguments(False)), [memoryview(octets)])
    described = read_description(next(steps))
    steps.send(memoryview(bytearray(described.byte_size)))


@pytest.mark.parametrize(
    ("contents", "error"),
    [
        (b"\x42\x05abc", DecodeError),
        (b"\x42", DecodeError),
        (b"\x42\x80\x80", DecodeError),
        (b"\x42\x01a\x08\x01", OtherField),
        (b"\x42\x00" * 4, TooManyElements),
    ],
)
def test_what_is_wrong_with_strings_is_found(contents: bytes, error: type[Exception]) -> None:
    assert are_strings(contents)
    with pytest.raises(error):
        write_strings(contents, 3, memoryview(bytearray(100)))


@given(st.lists(st.binary(max_size=200)))
def test_strings_never_take_more_than_twice_their_message(elements: list[bytes]) -> None:
    contents = pb.InferTensorContents(bytes_contents=elements).SerializeToString()
    memory = bytearray(2 * len(contents))
    written = write_strings(contents, len(elements), memoryview(memory))
    assert bytes(memory[:written]) == encode_strings(elements)


@pytest.mark.parametrize("octets", [b"\x2a\xff\xff\xff\x7f", b"\x0b", b"\n\x05ab"])
def test_what_is_no_message_is_a_decode_error(octets: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_large_request(octets)
