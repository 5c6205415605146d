"""Evidence from counts, and what it says."""

from __future__ import annotations

import math

import msgspec
import pytest

from bench.verdicts import SimulatedRow, line, simulate
from kernel.traffic.verdicts import (
    ERRORS,
    LATENCY,
    OUTPUTS,
    BadEvents,
    Counts,
    GuardVerdict,
    evidence_above,
    evidence_below,
    evidence_good,
    evidence_worse,
    judge,
    together,
)


def test_nothing_is_known_without_events() -> None:
    assert evidence_worse([BadEvents(0.1)]) == evidence_good([], 2) == 0
    assert judge(ERRORS, Counts(bad=[])).decision == "inconclusive"


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_the_evidence_is_a_fair_game_if_the_candidate_is_as_good(share: float) -> None:
    """The mean over where the next bad event occurs is what is there already (a martingale)."""
    for ratio, function in ((1.0, evidence_worse), (2.0, lambda counts: evidence_good(counts, 2.0))):
        before = [BadEvents(share, 3, 20)]
        part = ratio * share / (ratio * share + 1 - share)
        candidate = math.exp(function([BadEvents(share, 4, 20)]))
        stable = math.exp(function([BadEvents(share, 3, 21)]))
        assert part * candidate + (1 - part) * stable == pytest.approx(math.exp(function(before)))


@pytest.mark.parametrize("function", [evidence_above, evidence_below])
def test_the_evidence_of_a_bound_is_a_fair_game_at_the_bound(function: object) -> None:
    assert callable(function)
    before = math.exp(function(2, 500, 0.01))
    assert 0.01 * math.exp(function(3, 501, 0.01)) + 0.99 * math.exp(function(2, 501, 0.01)) == pytest.approx(before)


def test_events_of_different_shares_count_together() -> None:
    apart = [BadEvents(0.01, 2, 5), BadEvents(0.25, 9, 4)]
    assert evidence_worse(apart) > max(evidence_worse(apart[:1]), evidence_worse(apart[1:]))


def test_a_candidate_with_more_errors_is_stopped_and_the_verdict_says_the_numbers() -> None:
    verdict = judge(ERRORS, Counts([BadEvents(0.1, 8, 5)], 400, 3600))
    assert verdict.decision == "stop"
    assert verdict.sentence.startswith("errors: candidate 8 of 400 (2 %), stable 5 of 3600 (0.139 %): worse, evidence ")


def test_a_candidate_without_errors_passes_when_there_were_enough_requests() -> None:
    few, many = Counts([BadEvents(0.1)], 200, 1800), Counts([BadEvents(0.1)], 500, 4500)
    assert (judge(ERRORS, few).decision, judge(ERRORS, many).decision) == ("inconclusive", "pass")
    assert judge(LATENCY, many).decision == "inconclusive", "no slow response at all says nothing"


def test_different_outputs_have_a_bound() -> None:
    assert judge(OUTPUTS, Counts([BadEvents(0.5, 20)], 1000)).decision == "stop"
    assert judge(OUTPUTS, Counts([BadEvents(0.5, 0)], 4000)).decision == "pass"
    assert judge(OUTPUTS, Counts([BadEvents(0.5, 0)], 400)).decision == "inconclusive"


def test_one_guard_stops_and_all_must_pass() -> None:
    stop, good, unsure = GuardVerdict("stop", "a"), GuardVerdict("pass", "b"), GuardVerdict("inconclusive", "c")
    assert together([good, stop, unsure]) == stop
    assert together([good, unsure]) == unsure
    assert together([good, good]) == GuardVerdict("pass", "b; b")
    assert together([]).decision == "inconclusive"


@pytest.mark.parametrize(
    ("row", "decision", "least"),
    [
        (SimulatedRow("as good"), "stop", 0),
        (SimulatedRow("errors", errors=(0.005, 0.1)), "stop", 20),
        (SimulatedRow("slower", slow=(0.01, 0.065)), "stop", 20),
        (SimulatedRow("outputs", outputs=0.005), "stop", 19),
        (SimulatedRow("half", errors=(0.005, 0.02), share=0.5), "stop", 20),
        (SimulatedRow("alone", share=1, before=5000), "stop", 0),
        (SimulatedRow("alone, worse", errors=(0.005, 0.1), share=1, before=5000), "stop", 20),
        (SimulatedRow("alone, nothing known", share=1), "stop", 0),
        (SimulatedRow("alone, nothing known, broken", errors=(0.005, 0.3), share=1), "stop", 20),
    ],
)
def test_simulated_rollouts(row: SimulatedRow, decision: str, least: int) -> None:
    """Twenty rollouts with given seeds; `python -m bench verdicts` makes the table with 2,000."""
    outcomes = [simulate(row, seed) for seed in range(20)]
    stopped = sum(outcome.decision == decision for outcome in outcomes)
    assert stopped >= least if least else stopped <= 1
    assert line(row, outcomes).startswith(f"| {row.title} | {stopped * 5:.1f} %")


@pytest.mark.parametrize(
    ("bound", "bad", "decision"),
    [
        (0.5, 0, "pass"),
        (0.5, 1000, "stop"),
        (0.8, 0, "pass"),
        (0.8, 1000, "inconclusive"),
        (0.999, 1000, "inconclusive"),
    ],
)
def test_a_bound_that_is_nearly_everything_has_a_verdict(bound: float, bad: int, decision: str) -> None:
    """No share is one and a half times as large as the bound: nothing can say that there are surely more."""
    guard = msgspec.structs.replace(OUTPUTS, at_most=bound)
    assert judge(guard, Counts([BadEvents(1.0, candidate=bad)], candidate=1000)).decision == decision
