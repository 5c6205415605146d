"""When the requests of an open loop are due."""

from __future__ import annotations

import itertools
import random

import pytest

from kernel.tools.bench.load_process import POISSON, Arrivals
from kernel.tools.bench.processes import shares


def due(arrivals: Arrivals, count: int) -> list[int]:
    found = []
    for _ in range(count):
        found.append(arrivals.due_ns)
        arrivals.next()
    return found


def test_constant_arrivals_do_not_drift() -> None:
    found = due(Arrivals(3, uniform=random.random), 3001)
    assert found[3000] == pytest.approx(1000e9, abs=10)


def test_processes_take_turns() -> None:
    parts = [due(Arrivals(each.rate, phase=each.phase, uniform=random.random), 2) for each in shares(4, 8, 100)]
    assert sorted(each for part in parts for each in part) == [10_000_000 * number for number in range(8)]


def test_poisson_arrivals_have_the_rate_and_differ() -> None:
    found = due(Arrivals(1000, distribution=POISSON, uniform=random.Random(3).random), 20_000)
    assert found[-1] / 1e9 == pytest.approx(20, rel=0.03)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert min(gaps) < 50_000
    assert max(gaps) > 5_000_000


def test_every_connection_belongs_to_one_process() -> None:
    found = shares(4, 10, 100)
    assert [each.connections for each in found] == [3, 3, 2, 2]
    assert sum(each.rate for each in found) == 100
    assert [each.connections for each in shares(4, 2, 0)] == [1, 1]
