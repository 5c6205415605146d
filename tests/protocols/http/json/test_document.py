from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import InternalError, ServingError
from protocols.http.json import document
from protocols.http.json.document import (
    ABSENT,
    TooDeep,
    as_bool,
    as_unsigned,
    member,
    parse,
    reads_slowly,
    required,
)
from protocols.http.json.syntax import JsonSyntaxError


def test_special_numbers_are_read_in_all_of_tritons_spellings() -> None:
    values = parse(b'[NaN, -NaN, Inf, -Inf, Infinity, -Infinity, "Inf NaN \\" -Inf"]')
    assert math.isnan(values[0])
    assert math.isnan(values[1])
    assert values[2:6] == [math.inf, -math.inf, math.inf, -math.inf]
    assert values[6] == 'Inf NaN " -Inf'


def test_a_text_is_read_up_to_a_nul() -> None:
    assert parse(b'{"a": 1}\x00\xff\xff') == {"a": 1}


def test_strings_that_are_not_utf_8_are_refused() -> None:
    with pytest.raises(JsonSyntaxError, match="Invalid encoding in string. at 2"):
        parse(b'["\xff"]')


def test_a_document_nested_beyond_reason_is_refused() -> None:
    with pytest.raises(TooDeep):
        parse(b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"]":', "}]"), ("[1,", "]")])
def test_a_member_that_is_nested_beyond_reason_is_a_container_like_any_other(opening: str, closing: str) -> None:
    deep = opening * 1400 + "0" + closing * 1400
    document = parse(f'{{"ready": {deep}, "other": [1], "more": {deep}, "end": "]"}}'.encode())
    assert list(document) == ["ready", "other", "more", "end"]
    assert (type(document["ready"]), document["other"], document["end"]) == (
        list if opening[0] == "[" else dict, [1], "]",
    )  # fmt: skip
    with pytest.raises(InternalError, match="non-boolean as boolean"):
        as_bool(document["ready"])


@pytest.mark.parametrize("text", [b"[" * 5000, b"[" * 5000 + b"]" * 4999, b"[" * 5000 + b"}" * 5000 + b"x"])
def test_a_text_that_is_nested_beyond_reason_must_still_be_json(text: bytes) -> None:
    with pytest.raises(JsonSyntaxError):
        parse(text)


def test_a_large_text_with_an_error_at_its_end_is_refused_without_a_search() -> None:
    with pytest.raises(JsonSyntaxError):
        parse(b"[" + b"[]," * 500_000)


def test_members_are_absent_from_what_is_no_object() -> None:
    assert member([], "a") is ABSENT
    assert member({"a": None}, "a") is None
    with pytest.raises(InternalError, match="attempt to access non-existing object member 'b64'"):
        required(5, "b64")


@pytest.mark.parametrize("value", [True, -1, 1.0, 2**64, "1", None])
def test_only_64_bit_unsigned_integers_are_unsigned(value: Any) -> None:
    with pytest.raises(InternalError, match="non-unsigned-integer as unsigned-integer"):
        as_unsigned(value)


@given(st.binary() | st.text(alphabet='{}[]",:\\u0123eE+-.NaInftrls \n').map(str.encode))
def test_any_bytes_are_parsed_or_refused(text: bytes) -> None:
    try:
        value = parse(text)
    except ServingError:
        return
    json.dumps(value)


EXTREME = b"1e308", b"1.5E-310", b"1e+0299", b"1.2345678901234567e-300"


@pytest.mark.parametrize("number", EXTREME)
def test_many_numbers_near_the_ends_of_a_doubles_range_are_read_in_another_way(
    number: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b'{"a":[%b]}' % b",".join([number] * 10_000)
    assert reads_slowly(text)

    class NoDecoder:
        """Takes seconds for such a text."""

    monkeypatch.setattr(document, "fast_decoder", NoDecoder())
    assert parse(text) == {"a": [float(number)] * 10_000}


@pytest.mark.parametrize("number", [b"1e-05", b"1e22", b"0.25", b"123e1", b"3e-99"])
def test_other_numbers_are_read_as_usual(number: bytes) -> None:
    assert not reads_slowly(b"[%b]" % b",".join([number] * 1_000))


def test_a_few_extreme_numbers_are_read_as_usual() -> None:
    assert not reads_slowly(b"[%b]" % b",".join([b"1e308"] * 8))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_text_of_thousands_of_containers_within_each_other_is_too_deep(opening: bytes) -> None:
    with pytest.raises(TooDeep):
        parse(opening * 10_001)


@pytest.mark.parametrize("text", ["NaN", "-NaN", "Infinity", "-Infinity", "Inf", "-Inf"])
def test_special_numbers_are_read_in_all_their_forms(text: str) -> None:
    [found, kept] = parse(f'[{text}, "-NaN Inf {text}"]'.encode())
    assert math.isnan(found) if "NaN" in text else found == float(text)
    assert kept == f"-NaN Inf {text}"
    [found] = parse(f"[{text}]".encode())
    assert math.isnan(found) if "NaN" in text else found == float(text)


def test_strings_beside_special_numbers_stay_as_they_are() -> None:
    text = '["-NaN", -NaN, "a\\"Inf", Inf, "\\u0000", "\\\\", -Inf, {"Infinity": Infinity, "NaN": ""}]'
    found = parse(text.encode())
    assert math.isnan(found[1])
    assert [each for each in found if each == each] == [
        "-NaN", 'a"Inf', math.inf, "\0", "\\", -math.inf, {"Infinity": math.inf, "NaN": ""}
    ]  # fmt: skip
    with pytest.raises(JsonSyntaxError):
        parse(b"[-NaN" + b"," + b" " * 9000 + b"\0, Inf]")


def test_strings_in_a_text_that_is_nested_too_deep_do_not_count_as_containers() -> None:
    found = parse(b'{"a":' + b"[" * 1500 + b'"[[[[\\"]]",' * 3 + b"1" + b"]" * 1500 + b',"b":"]}"}')
    assert found["b"] == "]}"
    depth = 0
    found = found["a"]
    while found:
        [found], depth = found, depth + 1
    assert depth == 99, "what is deeper is left out"
