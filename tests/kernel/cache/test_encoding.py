"""Responses as bytes: what is written is read again, and nothing else is read at all."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.cache.encoding import (
    MAX_STRINGS,
    STRINGS_AT_ONCE,
    BadEntry,
    can_be_stored,
    decode,
    decode_in_pieces,
    encode,
)
from shm.tensor import Tensor

EXPECTED = {"A": "FP32", "B": "BYTES", "C": "UINT8", "D": "BOOL"}


def test_a_response_is_read_as_it_was_written() -> None:
    outputs = [
        Tensor("A", "FP32", [2, 1], b"12345678"),
        Tensor("B", "BYTES", [1], b"\2\0\0\0hi"),
        Tensor("C", "UINT8", [5000], bytes(range(250)) * 20),
        Tensor("D", "BOOL", [0], b""),
    ]
    found = decode(encode(outputs, {"a": 1, "b": "x", "c": True, "d": 0.5}), EXPECTED)
    assert [(t.name, t.datatype, t.shape, bytes(t.raw())) for t in found.outputs] == [
        (t.name, t.datatype, t.shape, t.data) for t in outputs
    ]
    assert found.parameters == {"a": 1, "b": "x", "c": True, "d": 0.5}
    assert not found.leased
    assert decode(encode([], None), EXPECTED).parameters is None


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(value: bytes) -> None:
    with pytest.raises(BadEntry):
        decode(value, EXPECTED)


@given(st.data())
def test_a_value_of_which_one_byte_changed_is_refused(data: st.DataObject) -> None:
    value = bytearray(encode([Tensor("A", "UINT8", [9], b"123456789")], None))
    position = data.draw(st.integers(0, len(value) - 1))
    value[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadEntry):
        decode(bytes(value), {"A": "UINT8"})


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
def test_an_output_that_contradicts_itself_is_refused(output: tuple[object, str]) -> None:
    with pytest.raises(BadEntry):
        decode(forged(([output], None), b"1234"), {"A": output[1]})


@pytest.mark.parametrize(
    ("name", "datatype"), [("X", "FP32"), ("A", "INT32"), ("A", "BYTES"), ("", "FP32"), ("A" * 100_000, "FP32")]
)
def test_an_output_that_the_model_does_not_have_is_refused(name: str, datatype: str) -> None:
    assert decode(forged(([("A", "FP32", [1], 4)], None), b"1234"), {"A": "FP32"}).outputs
    with pytest.raises(BadEntry, match="which the model does not have so"):
        decode(forged(([(name, datatype, [1], 4)], None), b"1234"), {"A": "FP32"})


def test_an_output_twice_is_refused() -> None:
    output = ("A", "FP32", [1], 4)
    with pytest.raises(BadEntry, match="output 'A' twice"):
        decode(forged(([output, output], None), b"1234" * 2), {"A": "FP32", "B": "FP32"})


@pytest.mark.parametrize("count", [2, 16, 70_000, 100_000])
def test_more_outputs_than_the_model_has_are_refused_before_any_is_made(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = forged(([("A", "FP32", [0], 0)] * count, None))
    monkeypatch.setattr("kernel.cache.encoding.head_decoder", None)
    with pytest.raises(BadEntry, match=f"{count} outputs, expected at most 1"):
        decode(value, {"A": "FP32"})


@pytest.mark.parametrize(
    "head",
    [
        None,
        [],
        5,
        "text",
        ["A", None],
        [{"A": 1}, None],
        ([("A", "FP32", [1] * 100_000, 4)], None),
        ([("A", "FP32", [1], 4, 5)], None),
        ([("A", "FP32", [1], 4)], None, 1),
        ([("A", "FP32", [1], 4)], {str(number): 1 for number in range(100_000)}),
        ([("A", "F" * 100_000, [1], 4)], None),
    ],
)
def test_a_head_with_more_than_a_response_has_is_refused(head: object) -> None:
    with pytest.raises(BadEntry):
        decode(forged(head, b"1234"), {"A": "FP32"})


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([1], b"\3\0\0\0hi"),  # longer than the data
        ([1], b"\1\0\0\0hi"),  # shorter
        ([2], b"\2\0\0\0hi"),  # fewer than the shape needs
        ([1], b"\0\0\0\0\0\0\0\0"),  # more
        ([1], b"\0\0"),
        ([1], b"\xff\xff\xff\xff"),
        ([1 << 40, 1 << 40], b""),
        ([MAX_STRINGS + 1], bytes(4 * (MAX_STRINGS + 1))),
    ],
)
def test_bytes_whose_lengths_are_wrong_are_refused(shape: list[int], data: bytes) -> None:
    assert decode(forged(([("A", "BYTES", [2], 8)], None), bytes(8)), {"A": "BYTES"}).outputs
    with pytest.raises(BadEntry):
        decode(forged(([("A", "BYTES", shape, len(data))], None), data), {"A": "BYTES"})


def test_many_strings_are_checked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    class CountedLengths:
        size, looks = 4, 0

        def unpack_from(self, data: memoryview, position: int) -> tuple[int]:
            CountedLengths.looks += 1
            return (int.from_bytes(data[position : position + 4], "little"),)

    monkeypatch.setattr("kernel.cache.encoding.STRING_LENGTH", CountedLengths())
    outputs = [Tensor(name, "BYTES", [MAX_STRINGS // 2], b"\2\0\0\0hi" * (MAX_STRINGS // 2)) for name in "AB"]
    looks: list[int] = []
    for _ in decode_in_pieces(encode(outputs, None), {"A": "BYTES", "B": "BYTES"}):
        looks.append(CountedLengths.looks - sum(looks))
    assert looks == [STRINGS_AT_ONCE] * (MAX_STRINGS // STRINGS_AT_ONCE)
    assert CountedLengths.looks == MAX_STRINGS


def test_only_what_can_be_read_again_is_stored() -> None:
    output = Tensor("A", "FP32", [1], b"1234")
    assert can_be_stored([output], {"a": 1}, {"A": "FP32"})
    assert can_be_stored([], None, {})
    assert not can_be_stored([output], None, {"A": "INT32"})
    assert not can_be_stored([output], None, {})
    assert not can_be_stored([output, output], None, {"A": "FP32"})
    assert not can_be_stored([output], {str(number): 1 for number in range(1000)}, {"A": "FP32"})
    many = Tensor("A", "BYTES", [MAX_STRINGS + 1], bytes(4 * (MAX_STRINGS + 1)))
    assert not can_be_stored([many], None, {"A": "BYTES"})
