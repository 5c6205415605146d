"""`python -m bench remote`: its figures are of a worker on this machine and of one that an agent has started."""

from __future__ import annotations

import shutil

import pytest

from bench.remote import ENCRYPTED, INLINE, LOCAL, REMOTE, RemoteCost, measure, median


def test_the_median_is_of_each_figure() -> None:
    costs = [RemoteCost(1, 20, 0, 5, 7), RemoteCost(2, 10, 1, 5, 9), RemoteCost(3, 30, 2, 6, 8)]
    assert median(costs) == RemoteCost(2, 20, 1, 5, 8)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_a_round_measures_each_place_of_the_worker() -> None:
    (places,) = measure(rounds=1, seconds=1, only="64 B").values()
    assert list(places) == [LOCAL, INLINE, REMOTE, ENCRYPTED]
    for cost in places.values():
        assert min(cost.kernel_us, cost.worker_us, cost.rate, cost.p50_us) > 0
