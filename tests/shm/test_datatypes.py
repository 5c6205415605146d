"""BYTES tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.datatypes import BadFraming, decode_strings, encode_strings


@given(st.lists(st.binary(max_size=50)))
def test_decoding_gives_back_what_was_encoded(elements: list[bytes]) -> None:
    assert decode_strings(encode_strings(elements)) == elements


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        elements = decode_strings(data)
    except BadFraming:
        return
    assert encode_strings(elements) == data


def test_text_is_encoded_as_utf8() -> None:
    assert encode_strings(["sø"]) == b"\x03\x00\x00\x00s\xc3\xb8"


def test_a_cut_element_is_refused() -> None:
    with pytest.raises(BadFraming) as caught:
        decode_strings(b"\x01\x00\x00\x00a\x05\x00\x00\x00b")
    assert (caught.value.index, caught.value.available) == (1, 1)
