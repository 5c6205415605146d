"""`naiad infer`: elements become raw bytes, and back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kernel.tools.elements import BadElement, decode_elements, encode_elements
from shm.datatypes import DATATYPES

SAMPLES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 2**16 - 1],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP16": [0.5, -65504.0],
    "FP32": [0.5, -(2.0**100)],
    "FP64": [0.1, -1e300],
    "BF16": [0.5, -(2.0**100)],
    "BYTES": ["", "é"],
}


def test_every_datatype_has_a_sample() -> None:
    assert SAMPLES.keys() == DATATYPES.keys()


@pytest.mark.parametrize("datatype", SAMPLES)
def test_elements_come_back_as_they_were(datatype: str) -> None:
    raw = encode_elements(datatype, SAMPLES[datatype])
    found = decode_elements(datatype, raw, 10)
    if datatype == "BYTES":
        found = [element.decode() for element in found]
    else:
        assert len(raw) == 2 * DATATYPES[datatype].byte_size
    assert found == SAMPLES[datatype]
    assert encode_elements(datatype, []) == b""
    assert decode_elements(datatype, b"", 10) == []


def test_only_the_first_elements_are_decoded() -> None:
    for datatype, sample in SAMPLES.items():
        assert len(decode_elements(datatype, encode_elements(datatype, sample), 1)) == 1


def test_numbers_may_be_what_json_has_no_form_for() -> None:
    for datatype in ("FP16", "BF16", "FP32", "FP64"):
        nan, high, low = decode_elements(datatype, encode_elements(datatype, ["nan", "Infinity", -math.inf]), 3)
        assert math.isnan(nan)
        assert (high, low) == (math.inf, -math.inf)


def test_a_text_with_other_bytes_than_utf_8_stays_as_it_is() -> None:
    assert encode_elements("BYTES", ["\udcff", b"\xfe"]) == b"\1\0\0\0\xff\1\0\0\0\xfe"


@pytest.mark.parametrize(
    ("datatype", "elements", "message"),
    [
        ("INT8", [1, 128], "128 is not between -128 and 127"),
        ("UINT64", [-1], "-1 is not between 0 and 18446744073709551615"),
        ("INT32", [1.5], "1.5 is not a whole number"),
        ("INT32", [True], "true is not a whole number"),
        ("INT32", [None], "null is not a whole number"),
        ("FP32", ["abc"], '"abc" is not a number'),
        ("FP32", [False], "false is not a number"),
        ("FP32", [1e39], "1e+39 is too large"),
        ("BF16", [-1e39], "-1e+39 is too large"),
        ("FP16", [1, 70000], "70000.0 is too large"),
        ("FP64", [10**400], f"1{'0' * 39}… is too large"),
        ("BOOL", [2], "2 is not true or false"),
        ("BOOL", [0.0], "0.0 is not true or false"),
        ("BOOL", ["true"], '"true" is not true or false'),
        ("BYTES", [1], "1 is not a text: put it into double quotes"),
        ("BYTES", ["\ud800"], '"\\ud800" is not a text that UTF-8 can have'),
        ("FP8", [1], "this command does not know the datatype"),
    ],
)
def test_an_element_that_does_not_fit_is_named(datatype: str, elements: list[Any], message: str) -> None:
    with pytest.raises(BadElement) as caught:
        encode_elements(datatype, elements)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("datatype", "data"), [("FP32", b"123"), ("BF16", b"1"), ("BYTES", b"\5\0\0\0x"), ("FP8", b"")]
)
def test_bytes_that_are_no_tensor_are_refused(datatype: str, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_elements(datatype, data, 10)
