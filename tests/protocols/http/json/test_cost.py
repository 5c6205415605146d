"""Estimates of what JSON costs: the parts of a text that take long are counted, wherever they stand.

The figures themselves are measured by hand: `python -m bench heavy --only medium` shows what they lead to.
"""

from __future__ import annotations

import pytest

from protocols.http.json.cost import decode_cost_us, encode_cost_us


def request(element: str, count: int, more: str = "") -> bytes:
    data = ",".join([element] * count)
    return f'{{"inputs":[{{"name":"X","datatype":"FP32","shape":[{count}],"data":[{data}]}}]{more}}}'.encode()


def test_a_thousand_floats_cost_less_than_the_way_to_a_helper() -> None:
    assert decode_cost_us(request("0.1234567890123456", 1024)) < 150


def test_sixteen_thousand_floats_cost_about_a_millisecond() -> None:
    assert 500 < decode_cost_us(request("0.1234567890123456", 16384)) < 1500


@pytest.mark.parametrize(
    ("element", "least_ns"),
    [("1", 23), ('""', 100), ('"abcdef"', 130), ("[1]", 80), ('"\\u00e9\\n"', 190), ("{}", 1000), ("1e300", 7000)],
)
def test_no_element_costs_less_than_it_was_measured_to_take(element: str, least_ns: float) -> None:
    assert decode_cost_us(request(element, 4000)) >= 4000 * least_ns / 1000


@pytest.mark.parametrize("exponent", ["e300", "E300", "e+300", "e-300", "e0300", "E+000300"])
def test_numbers_that_msgspec_reads_digit_by_digit_are_found_however_they_are_written(exponent: str) -> None:
    assert decode_cost_us(request("1" + exponent, 2000)) > 10_000


def test_small_exponents_cost_as_much_as_other_digits() -> None:
    assert decode_cost_us(request("1.5e-05", 4000)) < 2 * decode_cost_us(request("1.50005", 4000))


@pytest.mark.parametrize("more", [',"id":"x"', ',"outputs":[{"name":"Y"}]'])
def test_members_behind_the_data_change_little(more: str) -> None:
    plain = decode_cost_us(request("0.25", 4000))
    assert plain <= decode_cost_us(request("0.25", 4000, more)) < plain * 1.1


def test_numbers_of_many_digits_cost_more_for_each_byte() -> None:
    long = request("9007199254740993.0000000000000000001", 2000)
    assert decode_cost_us(long) >= 2000 * 0.48


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT32", "INT64", "FP32", "FP64", "BYTES"])
def test_encoding_costs_in_proportion_to_the_elements(datatype: str) -> None:
    one, ten = encode_cost_us(datatype, 1000, 8000), encode_cost_us(datatype, 10_000, 80_000)
    assert 0 < one < ten == pytest.approx(10 * one)


def test_long_strings_cost_more_than_short_ones() -> None:
    assert encode_cost_us("BYTES", 10, 1 << 20) > encode_cost_us("BYTES", 10, 1 << 10)
