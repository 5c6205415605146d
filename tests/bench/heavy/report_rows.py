"""Rows and samples of a report of heavy requests."""

from __future__ import annotations

from bench.heavy.attack import MIB, Attack, HeavyRow
from bench.heavy.healthy import Waits
from bench.heavy.measurement import MemoryGrowth, RowSample


def row(exceeds_budget: bool = False) -> HeavyRow:
    return HeavyRow("a row", "http", lambda n: Attack([]), "400", "too (many|large)", exceeds_budget=exceeds_budget)


def sample(
    p99_ms: float = 10, longest_ms: float = 100, growth: int = 0, status: str = "400", failures: tuple[str, ...] = ()
) -> RowSample:
    calm = Waits(100, 1, 2)
    others = Waits(100, p99_ms, longest_ms, list(failures))
    grown = MemoryGrowth(growth, 0, growth, 0, 0)
    return RowSample(status, ["too many"], 1.0, 0.1, {"http": calm, "grpc": others}, grown, 1, 60 * MIB, 100)
