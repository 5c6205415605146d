from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kernel.observe.histogram import Histogram, SlidingQuantiles


def test_a_value_equal_to_a_bound_is_in_the_bucket_below() -> None:
    histogram = Histogram([1, 5])
    for value in (0, 1, 2, 5, 6):
        histogram.observe(value)
    assert histogram.cumulative() == [2, 4, 5]
    assert histogram.sum == 14


def test_bounds_and_observations_may_have_different_units() -> None:
    seconds = Histogram([0.0025, 1], scale=10**9)
    seconds.observe(2_500_000)
    seconds.observe(2_500_001)
    assert seconds.bounds == (0.0025, 1.0)
    assert seconds.cumulative() == [1, 2, 2]


def test_added_observations_count_as_the_upper_bound_of_their_bucket() -> None:
    histogram = Histogram([1, 5])
    histogram.add([1.0, 5.0], [1, 2, 3], 40.5)
    histogram.add([0.5, 3.0, 5.0, 9.0], [1, 1, 1, 1, 1], 30)
    assert histogram.counts == [2, 4, 5]
    assert histogram.sum == 70.5


def test_bounds_are_sorted_and_unique() -> None:
    histogram = Histogram([2.5, -1, 0, 2.5, float("inf"), float("nan")])
    assert histogram.bounds == (-1.0, 0.0, 2.5)
    assert histogram.cumulative() == [0, 0, 0, 0]


def test_a_histogram_without_bounds_counts_and_adds() -> None:
    histogram = Histogram([])
    histogram.observe(3)
    assert (histogram.cumulative(), histogram.sum) == ([1], 3)


@given(st.lists(st.integers(0, 100), max_size=8), st.lists(st.integers(0, 120), max_size=20))
def test_each_bucket_counts_the_values_up_to_its_bound(bounds: list[int], values: list[int]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    assert histogram.cumulative() == [
        *(sum(value <= bound for value in values) for bound in histogram.bounds),
        len(values),
    ]


SECOND = 1_000_000_000


def test_without_observations_a_quantile_is_not_a_number() -> None:
    assert all(math.isnan(value) for value in SlidingQuantiles().values((0.0, 0.5, 1.0), now_ns=7 * SECOND))


def test_small_values_are_exact() -> None:
    quantiles = SlidingQuantiles()
    for value in range(1, 101):
        quantiles.observe(value, now_ns=SECOND)
    assert quantiles.values((0.01, 0.5, 0.9, 0.999, 1.0), now_ns=SECOND) == [1, 50, 90, 100, 100]
    assert (quantiles.count, quantiles.sum) == (100, 5050)


def test_quantiles_cover_a_minute_and_counts_everything() -> None:
    quantiles = SlidingQuantiles()
    quantiles.observe(200, now_ns=1 * SECOND)
    quantiles.observe(10, now_ns=40 * SECOND)
    assert quantiles.values((1.0,), now_ns=47 * SECOND) == [200]
    assert quantiles.values((1.0,), now_ns=61 * SECOND) == [10]
    assert math.isnan(quantiles.values((1.0,), now_ns=3600 * SECOND)[0])
    assert (quantiles.count, quantiles.sum) == (2, 210)


def test_a_rank_between_two_observations_is_rounded_up() -> None:
    quantiles = SlidingQuantiles()
    for value in (5, 5, 5, 9):
        quantiles.observe(value, now_ns=0)
    assert quantiles.values((0.75, 0.76), now_ns=0) == [5, 9]


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_within_half_a_percent_of_the_observation_of_its_rank(values: list[int], rank: float) -> None:
    quantiles = SlidingQuantiles()
    for value in values:
        quantiles.observe(value, now_ns=SECOND)
    exact = sorted(values)[max(math.ceil(rank * len(values)) - 1, 0)]
    (found,) = quantiles.values((rank,), now_ns=SECOND)
    assert abs(found - exact) <= exact * 0.004
