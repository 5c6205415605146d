"""A soak fails if the server holds more at its end than after its warm-up, and only then."""

from __future__ import annotations

import msgspec
import pytest

from tests.faults.soak.holdings import Holdings, sums_of_metrics
from tests.faults.soak.verdict import change, warm_up_s, wrong

HOLDINGS = Holdings(
    at_s=0.0,
    requests=0,
    memory=40 << 20,
    children_memory=80 << 20,
    descriptors=85,
    children_descriptors=90,
    threads=4,
    children=12,
    leased=0,
    in_flight=0,
    sequences=0,
    regions=0,
    connections=0,
    kinds={},
    processes={},
)


def samples(name: str = "memory", *values: int) -> list[Holdings]:
    """Return one sample a minute, whose figure `name` has these values."""
    found = [msgspec.structs.replace(HOLDINGS, at_s=60.0 * (n + 1), **{name: each}) for n, each in enumerate(values)]
    return found or [msgspec.structs.replace(HOLDINGS, at_s=60.0 * (n + 1)) for n in range(10)]


def test_what_stays_the_same_is_right() -> None:
    assert wrong(samples(), 300) == []


def test_the_first_samples_do_not_count() -> None:
    assert (warm_up_s(300), warm_up_s(3600), warm_up_s(7200)) == (60, 600, 600)
    assert wrong(samples("descriptors", *range(9), *[85] * 12), 3600) == []


def test_memory_may_move_by_five_percent() -> None:
    assert wrong(samples("memory", *[100] * 3, *[105] * 6), 300) == []
    assert wrong(samples("memory", *[100] * 3, *[106] * 6), 300) == ["memory has grown by 6.0%"]


def test_less_memory_is_right() -> None:
    assert wrong(samples("memory", *[100] * 3, *[50] * 6), 300) == []


@pytest.mark.parametrize("name", ["descriptors", "threads", "children", "leased", "regions", "sequences"])
def test_one_more_of_what_is_counted_is_a_leak(name: str) -> None:
    assert wrong(samples(name, *[7] * 3, *[8] * 6), 300) == [f"{name} was 7 at most, and is 8 at least"]


def test_what_moves_up_and_down_is_no_leak() -> None:
    assert wrong(samples("descriptors", *[84, 85, 84, 85, 84, 85, 85, 84, 85]), 300) == []


def test_too_few_samples_judge_nothing() -> None:
    assert wrong(samples("memory", 1, 2), 3600) == ["there are too few samples"]


def test_a_figure_that_was_zero_has_grown_wholly() -> None:
    assert change(samples("leased", 0, 0, 5), "leased") == 1.0


def test_metrics_are_added_up_over_their_labels() -> None:
    page = '# HELP naiad_a x\nnaiad_a{model="m"} 2\nnaiad_a{model="n"} 3.5\nnv_b 1e+06\n'
    assert sums_of_metrics(page) == {"naiad_a": 5.5, "nv_b": 1e6}
