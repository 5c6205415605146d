"""Elements and members are counted as a parser counts them, without objects."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.http.json.elements import count_parts

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
