from __future__ import annotations

import json
import math
import struct
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import InternalError, InvalidArgument, ServingError
from protocols.http.json.tensor import decode_data, json_values
from shm.datatypes import DATATYPES, decode_strings, encode_strings

NOT_UNSIGNED = "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"
INTEGERS = [f"{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)]


def decode(datatype: str, data: Any, count: int) -> bytes:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return decode_data("X", datatype, text, count)


def limits(datatype: str) -> tuple[int, int]:
    bits = 8 * DATATYPES[datatype].byte_size
    return (0, 2**bits - 1) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


# ---- round trips ----------------------------------------------------------------------------


@given(st.data(), st.sampled_from(INTEGERS))
def test_integers_survive_json_both_ways(data: st.DataObject, datatype: str) -> None:
    low, high = limits(datatype)
    values = data.draw(st.lists(st.integers(low, high)))
    raw = decode(datatype, values, len(values))
    assert json_values("X", datatype, raw, len(values)) == values


@given(st.lists(st.floats(width=64)))
def test_doubles_survive_json_both_ways(values: list[float]) -> None:
    raw = array("d", values).tobytes()
    found = json_values("X", "FP64", raw, len(values))
    text = msgspec.json.encode(found)
    back = array("d")
    back.frombytes(decode("FP64", text, len(values)))
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, back, strict=True))


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_survive_json_both_ways(values: list[float]) -> None:
    raw = array("f", values).tobytes()
    assert decode("FP32", msgspec.json.encode(json_values("X", "FP32", raw, len(values))), len(values)) == raw


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_strings_survive_json_both_ways(values: list[str]) -> None:
    raw = decode("BYTES", values, len(values))
    assert decode_strings(raw) == [value.encode() for value in values]
    assert json_values("X", "BYTES", raw, len(values)) == values


def test_booleans_survive_json_both_ways() -> None:
    assert decode("BOOL", [True, False], 2) == b"\x01\x00"
    assert json_values("X", "BOOL", b"\x01\x00", 2) == [True, False]


# ---- reading --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[[1]], [[2]]], [[[3]], [[4]]]], [1, [2, [3, []]], 4], [[], [1, 2, 3, 4]]],
)
def test_nested_data_is_flattened(data: Any) -> None:
    assert decode("INT32", data, 4) == struct.pack("<4i", 1, 2, 3, 4)
    assert decode("FP32", data, 4) == struct.pack("<4f", 1, 2, 3, 4)


def test_integers_wrap_around_like_a_cast_in_c() -> None:
    assert decode("UINT8", [300, 511], 2) == b"\x2c\xff"
    assert decode("INT8", [300, -300], 2) == struct.pack("<2b", 44, -44)
    assert decode("INT32", [2**31, -(2**31) - 1], 2) == struct.pack("<2i", -(2**31), 2**31 - 1)


def test_numbers_beyond_a_float_become_infinite() -> None:
    assert decode("FP32", [1e39, -1e39], 2) == struct.pack("<2f", math.inf, -math.inf)


def test_special_numbers_are_read() -> None:
    raw = decode("FP32", b"[Infinity, -Inf, 1]", 3)
    assert raw == struct.pack("<3f", math.inf, -math.inf, 1)
    assert math.isnan(struct.unpack("<d", decode("FP64", b"[[-NaN]]", 1))[0])


MISMATCH = (
    "Unable to parse 'data': Shape does not match true shape of 'data' field (input 'X' has %s elements in 'data', its "
    "shape has 2)"
)


@pytest.mark.parametrize(
    ("datatype", "data", "text"),
    [
        ("BOOL", [1, 0], "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        ("UINT8", [300, -1], NOT_UNSIGNED),
        ("UINT64", [0, 2**64], NOT_UNSIGNED),
        ("INT8", [1.0, 2], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT64", [2**63, 1], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT32", ["a", "b"], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT32", b"[NaN, 1]", "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("FP32", [True, 1], "Unable to parse 'data': attempt to access JSON non-number as double"),
        ("FP32", [None, 1], "Unable to parse 'data': attempt to access JSON non-number as double"),
        ("FP32", [{}, 1], "Unable to parse 'data': attempt to access JSON non-number as double"),
        ("BYTES", [1, 2], "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ("FP32", 5, "Unable to parse 'data': attempt to access JSON non-array as array"),
        ("FP32", {}, "Unable to parse 'data': attempt to access JSON non-array as array"),
        ("FP32", None, "Unable to parse 'data': attempt to access JSON non-array as array"),
        ("FP32", [1.0], MISMATCH % "1"),
        ("FP32", [1.0, 2.0, 3.0], MISMATCH % "3"),
        ("FP32", [], MISMATCH % "0"),
        ("FP32", [1.0, 2.0, "x"], MISMATCH % "3 or more"),
        ("FP32", [1.0, "x", 2.0], "Unable to parse 'data': attempt to access JSON non-number as double"),
    ],
)  # fmt: skip
def test_wrong_data_is_refused_with_tritons_text(datatype: str, data: Any, text: str) -> None:
    with pytest.raises(InternalError) as caught:
        decode(datatype, data, 2)
    assert caught.value.message == text


@pytest.mark.parametrize(
    ("datatype", "text"),
    [
        ("FP16", "receiving FP16 data via JSON is not supported. Please use the binary data format for input X"),
        ("BF16", "receiving BF16 data via JSON is not supported. Please use the binary data format for input X"),
        ("FLOAT", "invalid datatype for input X"),
    ],
)
def test_datatypes_that_json_cannot_carry_are_refused(datatype: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(datatype, [1.0], 1)
    assert caught.value.message == text


@pytest.mark.parametrize("depth", [101, 900, 50_000])
def test_data_nested_deeper_than_100_is_refused(depth: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode("FP32", b"[" * depth + b"1" + b"]" * depth, 1)
    assert caught.value.message == "Unable to parse 'data': JSON nesting depth exceeds maximum allowed limit (100)"


@pytest.mark.parametrize("depth", [1, 8, 9, 100])
def test_data_nested_up_to_100_deep_is_read(depth: int) -> None:
    assert decode("FP32", b"[" * depth + b"1" + b"]" * depth, 1) == struct.pack("<f", 1)


@given(
    st.sampled_from([*DATATYPES, "NONE"]),
    st.binary() | st.text(alphabet='[]",0123eE+-.NaInftrls ').map(str.encode),
    st.integers(0, 3),
)
def test_any_data_is_read_or_refused(datatype: str, text: bytes, count: int) -> None:
    try:
        raw = decode_data("X", datatype, text, count)
    except ServingError:
        return
    assert datatype == "BYTES" or len(raw) == count * DATATYPES[datatype].byte_size


# ---- writing --------------------------------------------------------------------------------


def test_floats_are_written_as_the_doubles_that_they_are() -> None:
    assert msgspec.json.encode(json_values("X", "FP32", struct.pack("<f", 0.1), 1)) == b"[0.10000000149011612]"


def test_special_numbers_are_written_as_triton_writes_them() -> None:
    raw = struct.pack("<4d", math.nan, math.inf, -math.inf, 0.5)
    assert msgspec.json.encode(json_values("X", "FP64", raw, 4)) == b"[NaN,Infinity,-Infinity,0.5]"


def test_numbers_whose_sum_overflows_are_written_as_numbers() -> None:
    values = [1.7e308, 1.7e308]
    assert json_values("X", "FP64", struct.pack("<2d", *values), 2) == msgspec.Raw(b"[1.7e308,1.7e308]")


def test_strings_that_are_not_utf_8_are_written_as_their_bytes() -> None:
    found = json_values("X", "BYTES", encode_strings([b"\xff\xfe", b'"a\n']), 2)
    assert msgspec.json.encode(found) == b'["\xff\xfe","\\"a\\n"]'


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_outputs_that_json_cannot_carry_are_refused(datatype: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        json_values("X", datatype, b"", 0)
    assert caught.value.message == (
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
    )


@pytest.mark.parametrize(
    ("datatype", "data"), [("FP32", b"\x00" * 7), ("BYTES", encode_strings([b"a"])), ("BYTES", b"\x05\x00\x00\x00a")]
)
def test_an_output_whose_bytes_are_not_its_shape_is_refused(datatype: str, data: bytes) -> None:
    with pytest.raises(InternalError) as caught:
        json_values("X", datatype, data, 2)
    assert caught.value.message == (
        "Failed to write 'data' field: output tensor shape does not match size of output for 'X'"
    )
