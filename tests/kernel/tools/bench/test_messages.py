"""Latencies are counted in narrow buckets, and the counts of processes can be added."""

from __future__ import annotations

import random

import pytest

from kernel.tools.bench.messages import LatencyHistogram


def histogram(values: list[int]) -> LatencyHistogram:
    found = LatencyHistogram()
    for value in values:
        found.record(value)
    return found


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 99.9, 100])
def test_percentiles_are_within_one_percent_of_the_sorted_values(percent: float) -> None:
    source = random.Random(5)
    values = [round(10 ** source.uniform(2, 10)) for _ in range(5000)]
    rank = max(1, -(-len(values) * percent // 100))
    expected = sorted(values)[int(rank) - 1]
    assert histogram(values).percentile(percent) == pytest.approx(expected, rel=0.01)


def test_small_values_and_the_mean_are_exact() -> None:
    found = histogram([3, 7, 200])
    assert [found.percentile(percent) for percent in (1, 50, 100)] == [3, 7, 200]
    assert (found.mean, found.largest, found.count) == (70, 200, 3)


def test_without_values_everything_is_zero() -> None:
    assert (LatencyHistogram().percentile(99), LatencyHistogram().mean) == (0, 0)


def test_values_out_of_range_count_at_its_ends() -> None:
    found = histogram([-5, 1 << 60])
    assert found.percentile(1) == 0
    assert found.percentile(100) > 1 << 47
    assert found.largest == 1 << 60


def test_histograms_of_processes_add_up() -> None:
    first, second = list(range(1000, 2000)), list(range(50_000, 60_000, 7))
    both = histogram([])
    for values in (first, second):
        part = histogram(values)
        both.add(part.as_map(), part.total, part.largest)
    together = histogram(first + second)
    assert both.as_map() == together.as_map()
    assert (both.mean, both.largest, both.count) == (together.mean, together.largest, together.count)
