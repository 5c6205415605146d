"""Exact intervals of the median, and verdicts that claim no more than the intervals show."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from bench.intervals import Interval, Quantity, RatioVerdict, geometric_means, is_acquitted, median_interval, verdict

LIMIT = 0.93


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [
        (1, 1, 1, 0.0),
        (3, 1, 3, 0.75),
        (5, 1, 5, 1 - 2 / 32),
        (6, 1, 6, 1 - 2 / 64),
        (8, 1, 8, 1 - 2 / 256),
        (9, 2, 8, 1 - 20 / 512),
        (15, 4, 12, 1 - 2 * (1 + 15 + 105 + 455) / 2**15),
    ],
)
def test_limits_are_the_kth_values_from_both_ends(count: int, low: int, high: int, confidence: float) -> None:
    values = [float(each) for each in range(1, count + 1)]
    random.Random(count).shuffle(values)
    assert median_interval(values) == Interval(statistics.median(values), low, high, confidence)


def test_the_interval_holds_the_true_median_as_often_as_its_confidence() -> None:
    generator = random.Random(0)
    samples = ([generator.expovariate(1) for _ in range(9)] for _ in range(4000))
    held = [found.low <= math.log(2) <= found.high for found in map(median_interval, samples)]
    assert sum(held) / len(held) == pytest.approx(1 - 20 / 512, abs=0.01)


def test_one_disturbed_round_does_not_move_the_interval() -> None:
    calm = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]
    assert median_interval([*calm[:-1], 0.2]).low >= 0.98


def test_the_inverse_of_an_interval_is_that_of_the_reciprocals() -> None:
    values = [0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 5.0]
    inverse = median_interval([1 / value for value in values])
    assert median_interval(values).inverse == inverse


def test_a_geometric_mean_is_over_the_rows_of_one_round() -> None:
    assert geometric_means([[1.0, 4.0, 1.0], [4.0, 1.0, 1.0]]) == pytest.approx([2.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.80, 0.92, "lower with confidence, and below 0.93 with confidence"),
        (0.90, 0.99, "lower with confidence, perhaps below 0.93"),
        (0.94, 0.99, "lower with confidence, not below 0.93"),
        (0.90, 1.00, "no difference with confidence, perhaps below 0.93"),
        (0.95, 1.10, "no difference with confidence, not below 0.93"),
        (1.01, 1.10, "higher with confidence"),
    ],
)
def test_a_rate_is_lower_only_where_the_whole_interval_lies_below_1(low: float, high: float, text: str) -> None:
    found = verdict(Quantity.RATE, Interval((low + high) / 2, low, high, 0.96), LIMIT)
    assert found == RatioVerdict(text, beyond_limit=high < LIMIT)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.10, 1.30, "longer with confidence, and above 1.08 with confidence"),
        (1.01, 1.30, "longer with confidence, perhaps above 1.08"),
        (0.90, 1.05, "no difference with confidence, not above 1.08"),
        (0.80, 0.90, "shorter with confidence"),
    ],
)
def test_a_latency_is_longer_only_where_the_whole_interval_lies_above_1(low: float, high: float, text: str) -> None:
    found = verdict(Quantity.P99, Interval((low + high) / 2, low, high, 0.96), LIMIT)
    assert found == RatioVerdict(text, beyond_limit=low > 1.08)


def test_few_rounds_give_no_verdict_however_far_the_ratio_is_from_1() -> None:
    found = verdict(Quantity.RATE, median_interval([0.1] * 5), LIMIT)
    assert found == RatioVerdict("too few rounds for a verdict")


@pytest.mark.parametrize("rounds", [6, 7, 8, 9, 12, 15])
def test_a_row_is_acquitted_exactly_when_no_rounds_to_come_can_find_it_guilty(rounds: int) -> None:
    for goods in range(rounds + 1):
        for bads in range(rounds + 1 - goods):
            so_far = [1.0] * goods + [0.9] * bads
            worst = so_far + [0.0001] * (rounds - len(so_far))
            guilty = verdict(Quantity.RATE, median_interval(worst), 0.95).beyond_limit
            assert is_acquitted(so_far, rounds, 0.95) is not guilty


def test_with_too_few_rounds_for_a_verdict_no_row_is_acquitted_early() -> None:
    assert not is_acquitted([1.0] * 5, rounds=5, limit=0.95)


def test_two_of_nine_rounds_settle_a_row_and_one_of_six() -> None:
    assert not is_acquitted([1.0], rounds=9, limit=0.95)
    assert is_acquitted([0.5, 1.0, 0.95], rounds=9, limit=0.95)
    assert is_acquitted([1.0], rounds=6, limit=0.95)
