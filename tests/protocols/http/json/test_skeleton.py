"""Numbers in the holes of a skeleton are read as the parser reads them, and everything else is left to the parser."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.http.json.document import UNDECODABLE
from protocols.http.json.skeleton import JsonSkeleton, tensor_reader
from protocols.http.json.tensor import decode_data, decode_elements, typed_decoder

NUMBER_TYPES = ("FP32", "FP64", "INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64")

#: Texts of values, most of them numbers, of which some are wrong or beyond the range of their type.
VALUES = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(2**70), 2**70).map(str),
    st.integers(-3, 300).map(str),
    st.from_regex(r"\A-?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?\Z"),
    st.sampled_from(["true", "false", "null", "NaN", "-Infinity", '"1"', '"ul"', "{}", "[1]", "-", "1.", "01", "-0"]),
)


def texts(depth: int) -> st.SearchStrategy[str]:
    """Arrays that are nested `depth` levels deep, mostly."""
    inner = VALUES if depth == 1 else st.one_of(texts(depth - 1), texts(depth - 1), VALUES)
    return st.lists(inner, max_size=4).map(lambda parts: f"[{','.join(parts)}]")


def read(datatype: str, count: int, text: bytes, depth: int = 1) -> bytes | None:
    """Return what a skeleton with one hole reads in `text`."""
    reader = tensor_reader(datatype, count, b"[" * depth)
    assert reader is not None
    values = JsonSkeleton([b'{"data":', b"}"], [reader]).read(b'{"data":%b}' % text, 0)
    return None if values is None else values[0]


@given(st.data(), st.sampled_from(NUMBER_TYPES), st.integers(1, 3), st.integers(1, 4))
def test_a_hole_has_the_values_that_the_parser_reads_or_none(
    data: st.DataObject, datatype: str, depth: int, count: int
) -> None:
    text = data.draw(texts(depth)).encode()
    found = read(datatype, count, text, depth)
    if found is None:
        return
    assert found == decode_data("a", datatype, text, count)


@pytest.mark.parametrize("count", [4, 96, 97, 1024])
@pytest.mark.parametrize("datatype", ["FP32", "INT64"])
def test_few_and_many_numbers_are_read(datatype: str, count: int) -> None:
    text = b"[%b]" % b", ".join(b"%d" % number for number in range(count))
    assert read(datatype, count, text) == struct.pack(f"<{count}{'f' if datatype == 'FP32' else 'q'}", *range(count))


@pytest.mark.parametrize("count", [2, 200])
@pytest.mark.parametrize("wrong", [b"true", b"false", b"null", b'"1"', b"[1]", b"{}", b"NaN", b"1e999"])
def test_what_is_no_number_is_left_to_the_parser(count: int, wrong: bytes) -> None:
    for datatype in ("FP32", "INT32"):
        assert read(datatype, count, b"[%b]" % b",".join([b"1"] * (count - 1) + [wrong])) is None


def test_fractions_are_no_integers() -> None:
    assert read("INT32", 2, b"[1,2.0]") is None
    assert read("INT32", 200, b"[%b]" % b",".join([b"1.0"] * 200)) is None


def test_of_too_many_numbers_only_the_first_are_decoded() -> None:
    """Numbers with large exponents take msgspec 10 us each. The number behind the last one is not looked at."""
    reader = tensor_reader("FP32", 2, b"[1]")
    assert reader is not None
    with pytest.raises(UNDECODABLE, match="length 2"):
        reader.decode(b"[1,2,3,this is no number]")


@given(st.data(), st.integers(1, 3))
def test_floats_are_those_of_the_typed_decoder(data: st.DataObject, depth: int) -> None:
    text = data.draw(texts(depth)).encode()
    right = _typed(depth, text)
    try:
        found = decode_elements(float, depth, text)
    except UNDECODABLE:
        assert right is None
        return
    assert right is not None
    assert struct.pack(f"{len(found)}d", *found) == struct.pack(f"{len(right)}d", *right)


def _typed(depth: int, text: bytes) -> list[Any] | None:
    try:
        values: list[Any] = typed_decoder(float, depth).decode(text)
    except UNDECODABLE:
        return None
    for _ in range(depth - 1):
        values = list(itertools.chain.from_iterable(values))
    return values


@pytest.mark.parametrize("text", [b"5", b"[[1],2]", b"[[1],[[2]]]", b"[]1", b"", b"[[1]"])
def test_arrays_of_another_nesting_are_no_floats(text: bytes) -> None:
    with pytest.raises(UNDECODABLE):
        decode_elements(float, 2, text)
