"""Texts of clients and models are cut, and lose what controls a terminal or ends a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.texts import has_control, limited, printable


@given(st.text(max_size=200), st.integers(8, 100))
def test_a_text_within_the_limit_stays_and_a_longer_one_names_its_length(text: str, limit: int) -> None:
    byte_size = len(text.encode(errors="surrogatepass"))
    found = limited(text, limit)
    if byte_size <= limit:
        assert found == text
    else:
        assert f"… ({byte_size} bytes) …" in found
        assert len(found.encode(errors="surrogatepass")) <= limit + 30


def test_the_begin_and_the_end_of_a_long_text_stay() -> None:
    found = limited(f"model '{'x' * 5000}' is not found", 100)
    assert found == f"model '{'x' * 68}… (5021 bytes) …{'x' * 11}' is not found"


def test_a_cut_never_falls_into_a_character() -> None:
    for limit in range(8, 40):
        assert "\ufffd" not in limited("é€😀" * 20, limit)


@pytest.mark.parametrize("character", ["\0", "\n", "\r", "\x1b", "\x7f", "\x85", "\x9b", "\u2028", "\u2029"])
def test_control_characters_are_written_out(character: str) -> None:
    assert has_control(f"a{character}b")
    shown = printable(f"a{character}b")
    assert not has_control(shown)
    assert shown.startswith("a\\")
    assert printable(f"a{character}b", keep=character) == f"a{character}b"


@given(st.text(max_size=50))
def test_other_characters_stay(text: str) -> None:
    assert printable(text, keep="".join(each for each in text if has_control(each))) == text
    assert not has_control(printable(text))
