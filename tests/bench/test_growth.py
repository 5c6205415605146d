"""What grows, and how its cost is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import growth, store
from bench.contenders import OURS, TRITON

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

AXES = {axis.name: axis for axis in growth.AXES}


def point(count: int, server: str = OURS, *, rate: float = 5000, cpu: float = 80) -> growth.GrowthPoint:
    return growth.GrowthPoint("models", count, "http", server, rate, 500, 900, cpu, 40, [])


def test_a_request_that_costs_the_same_is_flat() -> None:
    (verdict,) = growth.verdicts([point(1), point(64, cpu=90)])
    assert (verdict.flat, verdict.collapsed) == (True, False)


def test_a_request_that_costs_more_at_the_last_step_is_not_flat() -> None:
    (verdict,) = growth.verdicts([point(64, cpu=160), point(1)])
    assert verdict.kernel_cpu_ratio == 2
    assert not verdict.flat


def test_requests_spread_over_models_may_cost_as_much_as_a_single_one_but_not_more() -> None:
    alone = growth.GrowthPoint("connections", 1, "http", OURS, 3000, 500, 900, 150, 40, [])
    found = {
        last: next(v for v in growth.verdicts([alone, point(1), point(64, cpu=last)]) if v.axis == "models")
        for last in (160, 300)
    }
    assert found[160].flat
    assert found[300].kernel_cpu_ratio == 2
    assert not found[300].flat


def test_a_rate_under_half_of_the_best_has_collapsed() -> None:
    (verdict,) = growth.verdicts([point(1, rate=4000), point(4, rate=9000), point(64, rate=4000)])
    assert verdict.collapsed


def test_triton_is_not_judged() -> None:
    assert growth.verdicts([point(1, TRITON), point(64, TRITON, cpu=900)]) == []


def test_more_models_share_the_same_number_of_connections() -> None:
    axis = AXES["models"]
    assert axis.models(3) == ["add_sub_00", "add_sub_01", "add_sub_02"]
    assert axis.connections(1) == axis.connections(64) == growth.CONNECTIONS


def test_more_connections_use_one_model() -> None:
    axis = AXES["connections"]
    assert axis.models(256) == ["add_sub_00"]
    assert axis.connections(256) == 256


def test_a_quick_run_keeps_both_ends_but_loads_few_models() -> None:
    assert {name: growth.shortened(axis).counts for name, axis in AXES.items()} == {
        "connections": (1, 16, 256), "models": (1, 16), "instances": (1, 4), "waiting instances": (1, 4),
    }  # fmt: skip


def test_a_stored_growth_is_read_again(tmp_path: Path, stored_growth: growth.Growth) -> None:
    store.write_json(tmp_path / "growth.json", stored_growth)
    assert store.read_json(tmp_path / "growth.json", growth.Growth) == stored_growth


def test_the_table_ends_with_the_verdicts(stored_growth: growth.Growth, capsys: pytest.CaptureFixture[str]) -> None:
    growth.print_table(stored_growth)
    printed = capsys.readouterr().out
    assert printed.count("flat or falling") == len(stored_growth.verdicts) == 8
    assert "GROWS" not in printed
