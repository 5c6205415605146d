"""Responses as bytes: what is written is read again, and nothing else is read at all."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.cache.encoding import BadEntry, decode, encode
from shm.tensor import Tensor


def test_a_response_is_read_as_it_was_written() -> None:
    outputs = [
        Tensor("A", "FP32", [2, 1], b"12345678"),
        Tensor("B", "BYTES", [1], b"\2\0\0\0hi"),
        Tensor("C", "UINT8", [5000], bytes(range(250)) * 20),
        Tensor("D", "BOOL", [0], b""),
    ]
    found = decode(encode(outputs, {"a": 1, "b": "x", "c": True, "d": 0.5}))
    assert [(t.name, t.datatype, t.shape, bytes(t.raw())) for t in found.outputs] == [
        (t.name, t.datatype, t.shape, t.data) for t in outputs
    ]
    assert found.parameters == {"a": 1, "b": "x", "c": True, "d": 0.5}
    assert not found.leased
    assert decode(encode([], None)).parameters is None


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(value: bytes) -> None:
    with pytest.raises(BadEntry):
        decode(value)


@given(st.data())
def test_a_value_of_which_one_byte_changed_is_refused(data: st.DataObject) -> None:
    value = bytearray(encode([Tensor("A", "UINT8", [9], b"123456789")], None))
    position = data.draw(st.integers(0, len(value) - 1))
    value[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadEntry):
        decode(bytes(value))


def forged(head: object, data: bytes = b"") -> bytes:
    """Return a value with a right checksum."""
    encoded = msgspec.msgpack.encode(head)
    return zlib.crc32(encoded + data).to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded + data


@pytest.mark.parametrize(
    "output",
    [
        ("A", "FP32", [2], 4),  # too few bytes for the shape
        ("A", "FP31", [1], 4),
        ("A", "UINT8", [-1], 4),
        ("A", "UINT8", [5], 5),  # more than there are
        ("A", "UINT8", [3], 3),  # fewer than there are
        ("A", "UINT8", [-4], -4),
    ],
)
def test_an_output_that_contradicts_itself_is_refused(output: object) -> None:
    with pytest.raises(BadEntry):
        decode(forged(([output], None), b"1234"))
