"""Large tensor data in JSON: the same bytes and errors as decoding it as a whole, piece by piece.

Elements and members are counted as a parser counts them, without objects.
"""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import ServingError
from protocols.http.json import large
from protocols.http.json.document import made_valid
from protocols.http.json.large import count_parts, packed_size, write_data, write_flat
from protocols.http.json.tensor import NeedsCare, decode_data
from shm.datatypes import DATATYPES

DATATYPES_OF_JSON = ["BOOL", "INT8", "UINT8", "INT32", "UINT64", "INT64", "FP32", "FP64", "BYTES"]

#: Elements of every kind, right and wrong.
ELEMENTS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), st.text()
)


def written(datatype: str, text: str | bytes, count: int) -> bytes:
    octets = text.encode() if isinstance(text, str) else text
    memory = bytearray(packed_size(DATATYPES[datatype].byte_size, count, octets))
    return bytes(memory[: write_data("IN", datatype, memoryview(octets), count, memoryview(memory))])


def outcome(decode: object, *arguments: object) -> object:
    try:
        return decode(*arguments)  # type: ignore[operator]
    except ServingError as error:
        return type(error), error.message


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "PIECE_BYTE_SIZE", 16)
    monkeypatch.setattr(large, "STRINGS", re.compile(large.STRINGS.pattern.replace(b"4096", b"3"), re.DOTALL))


def same_type(datatype: str) -> st.SearchStrategy[list[object]]:
    kind = {"BOOL": st.booleans(), "BYTES": st.text()}.get(datatype)
    if kind is None and DATATYPES[datatype].typecode in "fd":
        kind = st.floats(allow_nan=False, allow_infinity=False, width=32)
    if kind is None:
        low, high = (0, 255) if datatype.startswith("U") else (-128, 127)
        kind = st.integers(low, high)
    return st.lists(kind, max_size=40)


@pytest.mark.parametrize("datatype", DATATYPES_OF_JSON)
@given(st.data())
def test_elements_become_what_they_become_as_a_whole(datatype: str, data: st.DataObject) -> None:
    values = data.draw(same_type(datatype))
    indent = data.draw(st.sampled_from([None, 2]))
    ascii_only = data.draw(st.booleans())
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    assert written(datatype, text, len(values)) == decode_data("IN", datatype, text.encode(), len(values))


@pytest.mark.parametrize("datatype", DATATYPES_OF_JSON)
@given(values=st.lists(ELEMENTS, max_size=12), count=st.integers(1, 12))
def test_wrong_elements_are_refused_as_they_are_as_a_whole(datatype: str, values: list[object], count: int) -> None:
    if datatype == "BYTES":  # their number is not checked as a whole
        count = max(count, len(values))
    text = json.dumps(values).encode()
    whole, pieces = outcome(decode_data, "IN", datatype, text, count), outcome(written, datatype, text, count)
    # Of several mistakes the one that is found first is reported.
    assert pieces == whole or (isinstance(pieces, tuple) and isinstance(whole, tuple))


@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BYTES"])
def test_nested_arrays_are_flattened(datatype: str) -> None:
    leaves = ["[a],[", ']"', "\\", "d"] if datatype == "BYTES" else [1, 2, 3, 4]
    text = json.dumps([[[leaves[0]], [leaves[1]]], [leaves[2:3], leaves[3:]]])
    assert written(datatype, text, 4) == decode_data("IN", datatype, text.encode(), 4)


@pytest.mark.parametrize(
    ("datatype", "text", "problem"),
    [
        ("FP32", '[1, {"a": [2, 3]}]', "attempt to access JSON non-number as double"),
        ("FP32", '{"a": 1}', "attempt to access JSON non-array as array"),
        ("INT32", "[1.5]", "attempt to access JSON non-signed-integer as signed-integer"),
        (
            "FP32",
            "[1, 2, 3]",
            "Shape does not match true shape of 'data' field (input 'IN' has 3 or more elements in "
            "'data', its shape has 2)",
        ),
        (
            "FP32",
            "[1]",
            "Shape does not match true shape of 'data' field (input 'IN' has 1 elements in 'data', its shape has 2)",
        ),
        ("BYTES", '["a", 1, "b"]', "attempt to access JSON non-string as string"),
        ("BYTES", '["a", ["b", null]]', "attempt to access JSON non-string as string"),
    ],
)
def test_what_is_wrong_is_named(datatype: str, text: str, problem: str) -> None:
    with pytest.raises(ServingError) as raised:
        written(datatype, text, 2)
    assert raised.value.message.endswith(problem)


def test_special_numbers_are_read_where_the_text_was_made_valid() -> None:
    text = made_valid(b'[1, NaN, -Infinity, Inf, "NaN"]')
    with pytest.raises(ServingError, match="non-number as double"):
        written("FP32", text, 5)
    text = made_valid(b"[1, NaN, -Infinity, Inf, 2.5]")
    values = memoryview(written("FP64", text, 5)).cast("d").tolist()
    assert math.isnan(values[1])
    assert [values[0], *values[2:]] == [1, -math.inf, math.inf, 2.5]


def test_a_string_that_names_a_special_number_stays_a_string() -> None:
    text = made_valid(b'["NaN", "a NaN b", "\\"NaN"]')
    assert written("BYTES", text, 3) == decode_data("IN", "BYTES", text, 3)
    with pytest.raises(ServingError, match="non-string as string"):
        written("BYTES", made_valid(b'["a", NaN]'), 2)


@pytest.mark.parametrize("strings", [[""] * 1000, ["x"] * 500, ["\U0001f600"] * 100, ["\\"] * 100])
def test_strings_never_take_more_than_was_reserved(strings: list[str]) -> None:
    for ascii_only in (True, False):
        text = json.dumps(strings, separators=(",", ":"), ensure_ascii=ascii_only).encode()
        assert len(written("BYTES", text, len(strings))) <= packed_size(0, len(strings), text)


# ---- usual arrays, whose text was not read before ------------------------------------------------


def flat(datatype: str, text: str, count: int) -> bytes:
    memory = bytearray(count * DATATYPES[datatype].byte_size)
    return bytes(memory[: write_flat(datatype, memoryview(text.encode()), count, memoryview(memory))])


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "INT64", "UINT8", "BOOL"])
def test_flat_arrays_become_the_bytes_that_they_become_as_a_whole(datatype: str) -> None:
    values: list[object] = [n % 2 == 0 for n in range(100)] if datatype == "BOOL" else list(range(100))
    text = json.dumps(values)
    assert flat(datatype, text, 100) == decode_data("IN", datatype, text.encode(), 100)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[]", 1),
        ("[1,,2]", 2),
        ("[1,2,]", 2),
        ("[,1,2]", 2),
        ("[1 2]", 2),
        ("[1111111,1111111,,1111111]", 3),
        ("[1111111,1111111,1111111,]", 3),
        ("[11111111111111,           ,1]", 2),
        ("[11111111111111, 1           ", 2),
        ("[[1,2]]", 2),
        ("[1],[2]", 2),
        ("[1,2]", 1),
        ("[1,2]", 3),
        ("[NaN,2]", 2),
        ('["1",2]', 2),
        ("1,2", 2),
        ("[1111111111111111111111111111111111,2]", 2),
    ],
)
def test_arrays_that_are_wrong_or_unusual_need_care(text: str, count: int) -> None:
    with pytest.raises(NeedsCare):
        flat("INT32", text, count)


@given(st.lists(st.sampled_from(["1", "-2.5", "3e5", ",", ",,", "[", "]", " ", "x", "NaN"]), max_size=30))
def test_a_flat_array_that_is_taken_is_valid(parts: list[str]) -> None:
    text = f"[{''.join(parts)}]"
    count = text.count(",") + 1
    try:
        found = flat("FP64", text, count)
    except NeedsCare:
        return
    assert found == decode_data("IN", "FP64", text.encode(), count)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda children: st.one_of(st.lists(children), st.dictionaries(st.text(), children)),
    max_leaves=20,
)


@given(
    st.one_of(st.lists(VALUES), st.dictionaries(st.text(), VALUES), st.lists(st.text()), st.lists(st.integers())),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.sampled_from([(",", ":"), (" , ", " : ")]),
)
def test_parts_are_counted_as_a_parser_counts_them(
    value: list[object] | dict[str, object], indent: int | None, ascii_only: bool, separators: tuple[str, str]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only, separators=separators).encode()
    assert count_parts(text, 1000) == len(value)
    assert count_parts(memoryview(text), 2) == min(len(value), 3), "no more than asked for is counted"


@pytest.mark.parametrize("text", ["1", '"[1, 2]"', "null", ""])
def test_scalars_count_as_one(text: str) -> None:
    assert count_parts(text.encode(), 10) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("[]", 0), ("[ \n]", 0), ("{}", 0), ('["a,b", 1, [2, 3]]', 3), ('["a", 1, "b", null]', 4), ('["\\\\", "\\""]', 2)],
)
def test_commas_in_strings_and_in_inner_arrays_do_not_count(text: str, count: int) -> None:
    assert count_parts(text.encode(), 10) == count


@pytest.mark.parametrize("part", ['"a"', "[1]", '{"a": []}', '[["x", 1], 2]', "1.5"])
def test_containers_of_many_parts_are_counted(part: str) -> None:
    many = "[" + ",".join([part] * 9000) + "]"
    assert count_parts(f'{{"a": {many}, "b": [{many}, {many}]}}'.encode(), 10) == 2
    assert count_parts(f"[{many}, {many}, 1]".encode(), 10) == 3
    assert count_parts(many.encode(), 1 << 20) == 9000
