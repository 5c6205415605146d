from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kernel.observe.histogram import Histogram


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
