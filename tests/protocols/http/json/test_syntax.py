from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.http.json import syntax
from protocols.http.json.syntax import MAX_VALUES, JsonSyntaxError, check_syntax

# Recorded from Triton 2.51.
REFUSED = [
    (b"", "The document is empty. at 0"),
    (b" ", "The document is empty. at 1"),
    (b"\x00", "The document is empty. at 0"),
    (b"{}x", "The document root must not be followed by other values. at 2"),
    (b'{"a":1}{', "The document root must not be followed by other values. at 7"),
    (b"0x1", "The document root must not be followed by other values. at 1"),
    (b"{nonsense", "Missing a name for object member. at 1"),
    (b"{", "Missing a name for object member. at 1"),
    (b"{,}", "Missing a name for object member. at 1"),
    (b'{"a":1,}', "Missing a name for object member. at 7"),
    (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
    (b'{"a"', "Missing a colon after a name of object member. at 4"),
    (b'{"a":1', "Missing a comma or '}' after an object member. at 6"),
    (b'{"a":1 "b"}', "Missing a comma or '}' after an object member. at 7"),
    (b"[1", "Missing a comma or ']' after an array element. at 2"),
    (b"[1 1]", "Missing a comma or ']' after an array element. at 3"),
    (b"[01]", "Missing a comma or ']' after an array element. at 2"),
    (b"[", "Invalid value. at 1"),
    (b"[[[[", "Invalid value. at 4"),
    (b"[1,]", "Invalid value. at 3"),
    (b"x", "Invalid value. at 0"),
    (b"-", "Invalid value. at 1"),
    (b"[-,1]", "Invalid value. at 2"),
    (b"[+1]", "Invalid value. at 1"),
    (b"[.5]", "Invalid value. at 1"),
    (b'{"a":tru}', "Invalid value. at 8"),
    (b'{"a":falsy}', "Invalid value. at 9"),
    (b'{"a":Nope}', "Invalid value. at 6"),
    (b'{"a":-I}', "Invalid value. at 7"),
    (b'{"a":Inx}', "Invalid value. at 7"),
    (b'{"a":Infinit}', "Invalid value. at 12"),
    (b'{"a":\x01}', "Invalid value. at 5"),
    (b"/*c*/{}", "Invalid value. at 0"),
    (b"[1.]", "Miss fraction part in number. at 3"),
    (b"[1e]", "Miss exponent in number. at 3"),
    (b"[1e400]", "Number too big to be stored in double. at 1"),
    (b'{"a":' + b"4" * 400 + b"}", "Number too big to be stored in double. at 5"),
    (b'{"inp', "Missing a closing quotation mark in string. at 5"),
    (b'"a\x00b"', "Missing a closing quotation mark in string. at 2"),
    (b'"a\nb"', "Invalid escape character in string. at 2"),
    (b'{"a":"x\\q"}', "Invalid escape character in string. at 7"),
    (b'{"a":"\\u12"}', "Incorrect hex digit after \\u escape in string. at 6"),
    (b'{"a":"\\ud800"}', "The surrogate pair in string is invalid. at 6"),
    (b'{"a":"\\ud800\\u0041"}', "The surrogate pair in string is invalid. at 6"),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_a_text_that_is_no_json_is_refused_with_tritons_words_and_offset(text: bytes, problem: str) -> None:
    with pytest.raises(JsonSyntaxError) as caught:
        check_syntax(text)
    assert caught.value.message == f"failed to parse the request JSON buffer: {problem}"


@pytest.mark.parametrize(
    "text",
    [
        b"NaN",
        b"[NaN,-NaN,Inf,-Inf,Infinity,-Infinity]",
        b"\xef\xbb\xbf{}",
        b' {"a" : [ 1 , -0.5e+3 , "\\ud83d\\ude00" , true , false , null , {} , [] ] } ',
        b"[" * 100_000 + b"]" * 100_000,
    ],
)
def test_what_triton_reads_beyond_json_is_accepted(text: bytes) -> None:
    check_syntax(text)


def test_a_nul_ends_the_document() -> None:
    assert check_syntax(b'{"a":1}\x00whatever') == 7


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_whatever_python_writes_as_json_is_accepted(value: object, ascii_only: bool, indent: int | None) -> None:
    try:
        text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    except UnicodeEncodeError:
        return
    if "\\ud" not in text.decode() or json.loads(text) == value:
        check_syntax(text)


@given(st.binary() | st.text(alphabet='{}[]",:\\u0123eE+-.NaInftrls \n').map(str.encode))
def test_any_bytes_are_accepted_or_refused(text: bytes) -> None:
    try:
        end = check_syntax(text)
    except JsonSyntaxError as error:
        end = error.offset
    assert 0 <= end <= len(text)


_NUMBERS = [
    "1",
    "-0",
    "01",
    "1.5",
    "1.",
    "-",
    "NaN",
    "-NaN",
    "Inf",
    "-Infinity",
    "Infin",
    "1e5",
    "1e999",
    "12345678901234567890",
    "+1",
    ".5",
]
_TOKENS = st.sampled_from([*_NUMBERS, "true", "nul", '"a"', "[]", "[1,2]", "{}", " 7 ", ""])


@given(st.lists(_TOKENS, max_size=12))
def test_elements_that_are_skipped_together_are_judged_as_one_by_one(tokens: list[str]) -> None:
    text = f"[{','.join(tokens)}]".encode()

    def judged() -> object:
        try:
            return check_syntax(text)
        except JsonSyntaxError as error:
            return error.message

    together = judged()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(syntax, "PLAIN_ELEMENTS", re.compile(rb"(?!)"))
        assert judged() == together


@pytest.mark.parametrize("part", [b"[1,", b"[{},", b"[1e1,", b'["",'])
def test_of_thousands_of_values_only_the_first_are_looked_at_one_by_one(part: bytes) -> None:
    text = part * MAX_VALUES + b"?"
    assert check_syntax(text) == len(text)
    with pytest.raises(JsonSyntaxError, match="Invalid value"):
        check_syntax(part * (MAX_VALUES // 3) + b"?")


def test_plain_elements_are_looked_at_up_to_the_last_one() -> None:
    text = b"[" + b"1,NaN," * 10 * MAX_VALUES + b"?]"
    with pytest.raises(JsonSyntaxError) as caught:
        check_syntax(text)
    assert caught.value.offset == text.index(b"?")
