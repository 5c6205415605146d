"""The verdict on a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.heavy.attack import MIB, Attack, GrpcCall, HttpRequest
from bench.heavy.healthy import Waits, waits
from bench.heavy.report import KEPT_BYTE_SIZE, growth_limit, judge
from tests.bench.heavy.report_rows import row, sample

if TYPE_CHECKING:
    from bench.heavy.measurement import RowSample

BUDGET = 360 * MIB


def test_a_row_within_its_limits_has_ratios_below_1() -> None:
    verdict = judge(row(), BUDGET, [sample(growth=90 * MIB)])
    assert (verdict.p99, verdict.longest, verdict.growth) == (0.5, 0.4, 0.5)
    assert verdict.wrong == []


@pytest.mark.parametrize(
    ("measured", "wrong"),
    [
        (sample(p99_ms=30), "p99 is 1.5 times its limit"),
        (sample(longest_ms=500), "longest wait is 2.0 times its limit"),
        (sample(growth=360 * MIB), "growth is 2.0 times its limit"),
        (sample(status="200"), "status 200, expected 400"),
        (sample(status=""), "status none, expected 400"),
        (sample(failures=("closed",)), "a healthy request failed: closed"),
        (msgspec.structs.replace(sample(), texts=["other"]), "'too (many|large)' is not in the response"),
    ],
)
def test_what_exceeds_a_limit_is_named(measured: RowSample, wrong: str) -> None:
    assert judge(row(), BUDGET, [measured]).wrong == [wrong]


def test_several_requests_at_once_have_a_limit_of_their_own() -> None:
    several = msgspec.structs.replace(sample(p99_ms=40), at_once=20)
    assert judge(row(), BUDGET, [several]).p99 == 0.8
    assert judge(row(), BUDGET, [several]).wrong == []
    assert judge(row(), BUDGET, [msgspec.structs.replace(several, at_once=1)]).wrong == ["p99 is 2.0 times its limit"]


def test_waits_are_medians_of_rounds_and_the_growth_is_the_largest() -> None:
    rounds = [sample(p99_ms=1), sample(p99_ms=10), sample(p99_ms=1000, growth=360 * MIB)]
    verdict = judge(row(), BUDGET, rounds)
    assert verdict.p99 == 0.5
    assert verdict.growth == 2


def test_small_bodies_count_as_some_mebibytes_and_some_rows_have_the_budget_as_their_limit() -> None:
    def limit(body: int, response: int = 100, *, exceeds_budget: bool = False) -> int:
        measured = msgspec.structs.replace(sample(), body_byte_size=body, response_byte_size=response)
        return growth_limit(row(exceeds_budget), BUDGET, measured)

    assert limit(60 * MIB) == 180 * MIB
    assert limit(60 * MIB, 100 * MIB) == 300 * MIB
    assert limit(100) == 12 * MIB
    assert limit(480 * MIB, exceeds_budget=True) == BUDGET + KEPT_BYTE_SIZE + 12 * MIB


def test_calls_of_one_connection_are_at_the_server_at_once_and_requests_over_http_are_not() -> None:
    assert Attack([HttpRequest("/", b"")] * 3).at_once == 1
    assert Attack([HttpRequest("/", b"")], connections=3).at_once == 3
    assert Attack([GrpcCall("ModelInfer", [b""])] * 3, connections=2).at_once == 6


def test_the_99th_percentile_leaves_out_one_in_a_hundred() -> None:
    found = waits([n / 1000 for n in range(1, 201)], ["wrong"])
    assert found == Waits(200, 198.0, 200.0, ["wrong"])
    assert waits([], []) == Waits(0, 0.0, 0.0)
