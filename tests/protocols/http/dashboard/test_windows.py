"""Rates and quantiles of the last seconds."""

from __future__ import annotations

import pytest

from protocols.http.dashboard.windows import WINDOW_NS, LanguageReading, LanguageWindow, Reading, Window, quantile

S = 1_000_000_000


def test_rates_are_those_of_the_window() -> None:
    window = Window(Reading(0))
    for second in range(1, 31):
        window.add(Reading(second * S, success=second * 10, rows=second * 40, executions=second * 5))
    assert window.rate("success") == pytest.approx(10)
    assert window.seconds() == pytest.approx(WINDOW_NS / S)
    assert window.count("rows") / window.count("executions") == 8
    assert not window.quiet


def test_a_rate_after_a_quiet_time_counts_from_its_end() -> None:
    window = Window(Reading(0, success=5))
    for second in range(1, 1000):
        assert window.quiet
        window.rest(second * S)
    window.add(Reading(1000 * S, success=25))
    assert window.rate("success") == pytest.approx(20)


def test_a_model_that_was_loaded_again_has_no_negative_rate() -> None:
    window = Window(Reading(0, success=100))
    window.add(Reading(S, success=3))
    assert window.rate("success") == 0


def test_a_window_without_requests_has_no_quantile_and_no_stages() -> None:
    window = Window(Reading(0, durations=(1, 2, 3)))
    window.add(Reading(S, durations=(1, 2, 3)))
    assert window.quantile_s((0.1, 0.2), 0.5) is None
    assert window.stages_ms() is None
    assert window.batches() == []


def test_quantiles_are_those_of_the_window_alone() -> None:
    window = Window(Reading(0, durations=(1000, 0, 0)))
    window.add(Reading(S, success=4, durations=(1000, 4, 0)))
    assert window.quantile_s((0.1, 0.2), 0.5) == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([10, 0, 0], 0.5, 0.5),
        ([0, 10, 0], 0.5, 2.0),
        ([5, 5, 0], 0.5, 1.0),
        ([5, 5, 0], 0.9, 2.6),
        ([0, 0, 7], 0.99, 3.0),
        ([99, 1, 0], 0.99, 1.0),
        ([0, 0, 0], 0.5, None),
    ],
)
def test_within_a_bucket_durations_are_spread_evenly(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile(counts, (1.0, 3.0), share) == (None if expected is None else pytest.approx(expected))


def test_stages_and_batches_are_differences() -> None:
    window = Window(Reading(0, success=10, stages_ns=(S, 0, 0, 0), batches={1: 10, 4: 2}))
    window.add(Reading(S, success=12, stages_ns=(S + 4_000_000, 2_000_000, 0, 0), batches={1: 10, 4: 3, 2: 7}))
    assert window.stages_ms() == [2.0, 1.0, 0.0, 0.0]
    assert window.batches() == [(2, 7), (4, 1)]


def language(at_s: int, tokens: int, first: tuple[int, ...] = (0, 0, 0)) -> LanguageReading:
    return LanguageReading(at_s * 1_000_000_000, tokens, 2 * tokens, first, (0, 0, 0))


def test_tokens_are_counted_over_the_last_seconds() -> None:
    window = LanguageWindow()
    window.add(language(100, 50))
    assert window.rate("generation_tokens") == 0
    for second in range(101, 121):
        window.add(language(second, 50 + 3 * (second - 100)))
    assert (window.rate("generation_tokens"), window.rate("prompt_tokens")) == (3, 6)


def test_first_tokens_of_the_window_have_quantiles_and_older_ones_have_not() -> None:
    window = LanguageWindow()
    window.add(language(100, 0, (8, 0, 0)))
    assert window.quantile_ms("first_tokens", (0.01, 0.1), 0.5) is None
    window.add(language(105, 0, (8, 2, 0)))
    assert window.quantile_ms("first_tokens", (0.01, 0.1), 0.5) == 55
