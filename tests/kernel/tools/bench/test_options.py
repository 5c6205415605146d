"""Ranges of loads, percentiles, shapes and headers of the command line."""

from __future__ import annotations

import pytest

from kernel.errors import BadOption
from kernel.tools.bench.options import BenchLevel, headers_of, levels_of, percents_of, shapes_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", [4]),
        ("1:64", [1, 2, 4, 8, 16, 32, 64]),
        ("1:24", [1, 2, 4, 8, 16, 24]),
        ("1:9:4", [1, 5, 9]),
        ("8,1:3:1", [1, 2, 3, 8]),
        ("", [1, 2, 4, 8, 16]),
    ],
)
def test_a_range_doubles_and_a_step_adds(text: str, expected: list[int]) -> None:
    assert [level.connections for level in levels_of(text, "")] == expected


def test_rates_are_an_open_loop_whose_connections_are_the_most() -> None:
    assert levels_of("", "100:300:100")[-1] == BenchLevel(256, 300)
    assert levels_of("1:32", "0.5") == [BenchLevel(32, 0.5)]


@pytest.mark.parametrize("text", ["0", "x", "5:1", "1:2:3:4", "1.5", "1:1000:1", "20000", "-1", "nan"])
def test_wrong_ranges_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match="--concurrency"):
        levels_of(text, "")


def test_percentiles_shapes_and_headers() -> None:
    assert percents_of("99,p50, 99.9") == [50, 99, 99.9]
    assert shapes_of(["A:1,2", "B:x:3"]) == {"A": [1, 2], "B:x": [3]}
    assert headers_of(["Authorization: Bearer a:b"]) == {"Authorization": "Bearer a:b"}


def test_wrong_percentiles_shapes_and_headers_are_refused() -> None:
    for text in ("0", "101", "a", "nan"):
        with pytest.raises(BadOption, match="--percentiles"):
            percents_of(text)
    for text in ("A", "A:", "A:-1", ":1"):
        with pytest.raises(BadOption, match="--shape"):
            shapes_of([text])
    for text in ("A", ": b", "A: b\r\nC: d"):
        with pytest.raises(BadOption, match="--header"):
            headers_of([text])
