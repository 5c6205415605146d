"""The messages of attackers are what protobuf reads in them."""

from __future__ import annotations

import struct

import pytest
from google.protobuf.message import DecodeError

from bench.heavy import messages as wire
from protocols.grpc.generated import grpc_service_pb2 as pb


def parsed(message: bytes) -> pb.ModelInferRequest:
    return pb.ModelInferRequest.FromString(message)


@pytest.mark.parametrize(("value", "encoded"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\1"), (300, b"\xac\2")])
def test_numbers_take_seven_bits_a_byte(value: int, encoded: bytes) -> None:
    assert wire.varint(value) == encoded


def test_a_tensor_has_typed_contents() -> None:
    count, field = wire.packed_ints(10_000)
    request = parsed(wire.infer_message("m", wire.infer_input("INT32", [count], wire.contents(field))))
    assert request.model_name == "m"
    (tensor,) = request.inputs
    assert tensor.shape == [count]
    assert len(tensor.contents.int_contents) == count
    assert len(field) == pytest.approx(10_000, rel=0.5)


def test_packed_floats_are_different_numbers_that_are_finite() -> None:
    count, field = wire.packed_floats(8192)
    values = pb.InferTensorContents.FromString(field).fp32_contents
    assert len(values) == count == 2048
    assert len(set(values)) > 1000
    assert wire.floats(3) == struct.pack("<3f", *values[:3])


def test_map_entries_have_different_keys() -> None:
    request = parsed(wire.map_entries(4, b"\x10\1", 1000))
    assert {name: value.int64_param for name, value in request.parameters.items()} == {
        f"{number:07}": 1 for number in range(len(request.parameters))
    }
    load = pb.RepositoryModelLoadRequest.FromString(wire.map_entries(3, wire.delimited(4, b"x"), 100, b"file:1/"))
    assert load.parameters["file:1/0000000"].bytes_param == b"x"


def test_unknown_fields_are_skipped() -> None:
    unknown = wire.tag(wire.UNKNOWN, wire.VARINT) + b"\1" + wire.delimited(wire.UNKNOWN, b"abc")
    assert parsed(wire.infer_message("m", unknown)).model_name == "m"


def test_groups_are_nested_as_deep_as_fits() -> None:
    shallow, deep = wire.nested_groups(40), wire.nested_groups(4000)
    assert (len(shallow), len(deep)) == (40, 4000)
    assert parsed(wire.infer_message("m", shallow)).model_name == "m"
    with pytest.raises(DecodeError):
        parsed(deep)
