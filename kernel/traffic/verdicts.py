"""What the counts of a rollout say: stop the candidate, it is good enough, or neither is sure. Pure.

A verdict can be asked for after every request. With the settings that are the default, a candidate that is as good as
the stable version is stopped in at most 1 % of all rollouts, all guards together, and one that is as bad as no guard
accepts is passed by each guard in at most 5 %. Too few events are *inconclusive*.

A rollout sends the share w of the requests to a candidate. If the candidate is as good as the stable version, each bad
event, wherever it occurs, is the candidate's with probability w, however often events occur. If events are r times as
frequent with the candidate, it is theta(r, w) = r w / (r w + 1 - w). So only bad events are looked at, and their
likelihood ratio is a martingale: by Ville's inequality it exceeds 1/alpha with a probability of at most alpha, however
often one looks (Ville 1939; Johari et al., "Always valid inference", 2022). An average of such ratios over several r is
one again. Evidence is the natural logarithm of such an average.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: Ratios at which a candidate may be worse, and how much each counts. Most that are worse are two to five times worse;
#: the others are found quickly anyway.
WORSE = ((1.5, 0.05), (2.5, 0.2), (4.0, 0.35), (7.0, 0.25), (15.0, 0.1), (50.0, 0.05))

#: Ratios at which a candidate is good enough, against the worst ratio that is not accepted.
GOOD = ((1.0, 0.4), (0.75, 0.2), (0.5, 0.2), (0.25, 0.2))

#: The same for a share of bad events that has a bound: parts of the bound.
GOOD_PARTS = ((0.0, 0.4), (0.25, 0.3), (0.5, 0.3))


class BadEvents(msgspec.Struct):
    """Bad events of one kind while the candidate had one share of the requests."""

    #: Between 0 and 1, without them.
    share: float
    candidate: int = 0
    stable: int = 0


def evidence_worse(counts: Iterable[BadEvents], ratio: float = 1.0) -> float:
    """Return the evidence that bad events are more than `ratio` times as frequent with the candidate."""
    return _mixture(counts, [(factor * ratio, part) for factor, part in WORSE], ratio)


def evidence_good(counts: Iterable[BadEvents], ratio: float) -> float:
    """Return the evidence that bad events are less than `ratio` times as frequent with the candidate."""
    return _mixture(counts, [(factor, part) for factor, part in GOOD if factor < ratio], ratio)


def evidence_above(bad: int, total: int, bound: float) -> float:
    """Return the evidence that more than the share `bound` of events is bad, of which `bad` of `total` are."""
    ratios = [(factor * bound, part) for factor, part in WORSE if factor * bound < 1]
    if not ratios:  # each of these multiples of `bound` is more than 100 %
        return -math.inf
    return _log_sum(ratios, lambda share: _log_share_ratio(bad, total, share, bound))


def evidence_below(bad: int, total: int, bound: float) -> float:
    """Return the evidence that less than the share `bound` of events is bad."""
    return _log_sum(
        [(factor * bound, part) for factor, part in GOOD_PARTS],
        lambda share: _log_share_ratio(bad, total, share, bound),
    )


def _mixture(counts: Iterable[BadEvents], ratios: Sequence[tuple[float, float]], against: float) -> float:
    places = [each for each in counts if each.candidate or each.stable]
    if not places:
        return 0.0
    logs = []
    for ratio, part in ratios:
        log = math.log(part)
        for each in places:
            this, other = _theta(ratio, each.share), _theta(against, each.share)
            log += each.candidate * math.log(this / other) + each.stable * math.log((1 - this) / (1 - other))
        logs.append(log)
    return _log_of_sum(logs) - math.log(sum(part for _, part in ratios))


def _theta(ratio: float, share: float) -> float:
    """Return which part of the bad events is the candidate's."""
    return ratio * share / (ratio * share + 1 - share)


def _log_share_ratio(bad: int, total: int, share: float, bound: float) -> float:
    if not share and bad:
        return -math.inf
    worse = bad * math.log(share / bound) if bad else 0.0
    return worse + (total - bad) * math.log((1 - share) / (1 - bound))


def _log_sum(parts: Sequence[tuple[float, float]], log: Callable[[float], float]) -> float:
    logs = [math.log(part) + log(share) for share, part in parts]
    return _log_of_sum(logs) - math.log(sum(part for _, part in parts))


def _log_of_sum(logs: Sequence[float]) -> float:
    highest = max(logs)
    if highest == -math.inf:
        return highest
    return highest + math.log(sum(math.exp(log - highest) for log in logs))


#: The probability that a good candidate is stopped, and that a guard passes one that it does not accept.
FALSE_STOPS = 0.01

FALSE_PASSES = 0.05


class Guard(msgspec.Struct, frozen=True):
    """What a rollout looks at."""

    #: `errors`, `latency` or `outputs`.
    name: str
    #: The part of `FALSE_STOPS` that is this guard's.
    part: float
    #: Stop if bad events are more frequent with the candidate than with the stable version; pass if they are surely
    #: less than this times as frequent. None if only the bound counts.
    ratio: float | None = None
    #: Pass if bad events are surely a smaller share of the candidate's requests. None if only the ratio counts. With no
    #: ratio a larger share also stops.
    at_most: float | None = None
    #: What a bad event is called in a sentence.
    event: str = "errors"
    #: What the events are, good and bad, of a guard without a ratio.
    events: str = "pairs"


ERRORS = Guard("errors", 0.35, ratio=2.0, at_most=0.01, event="errors")

LATENCY = Guard("latency", 0.35, ratio=2.0, event="slow responses")

OUTPUTS = Guard("outputs", 0.3, at_most=0.001, event="different outputs")

GUARDS = {guard.name: guard for guard in (ERRORS, LATENCY, OUTPUTS)}


class Counts(msgspec.Struct):
    """What was counted for one guard in a rollout."""

    #: One for each share that the candidate has had.
    bad: list[BadEvents] = []
    #: Events of the candidate and of the stable version, good and bad; pairs of outputs count as the candidate's.
    candidate: int = 0
    stable: int = 0

    @property
    def candidate_bad(self) -> int:
        """How many events of the candidate were bad."""
        return sum(each.candidate for each in self.bad)

    @property
    def stable_bad(self) -> int:
        """How many events of the stable version were bad."""
        return sum(each.stable for each in self.bad)


class GuardVerdict(msgspec.Struct, frozen=True):
    """What one guard, or all of them, say."""

    decision: Literal["stop", "pass", "inconclusive"]
    #: One sentence with the numbers.
    sentence: str


def judge(guard: Guard, counts: Counts) -> GuardVerdict:
    """Return what one guard says."""
    numbers = _numbers(guard, counts)
    worse, good = log_evidence(guard, counts)
    needed = math.log(1 / (FALSE_STOPS * guard.part))
    if worse >= needed:
        return GuardVerdict("stop", f"{numbers}: worse, evidence {_times(worse)} of {_times(needed)} needed")
    wanted = math.log(1 / FALSE_PASSES)
    if good >= wanted:
        return GuardVerdict("pass", f"{numbers}: good enough, evidence {_times(good)} of {_times(wanted)} needed")
    return GuardVerdict(
        "inconclusive",
        f"{numbers}: neither is sure, evidence {_times(worse)} of {_times(needed)} for worse, "
        f"{_times(good)} of {_times(wanted)} for good enough",
    )


def log_evidence(guard: Guard, counts: Counts) -> tuple[float, float]:
    """Return the evidence that the candidate is worse, and that it is good enough."""
    worse, good = -math.inf, -math.inf
    if guard.ratio is not None:
        worse, good = evidence_worse(counts.bad), evidence_good(counts.bad, guard.ratio)
    if guard.at_most is not None and counts.candidate:
        bad = counts.candidate_bad
        good = max(good, evidence_below(bad, counts.candidate, guard.at_most))
        if guard.ratio is None:
            worse = evidence_above(bad, counts.candidate, guard.at_most)
    return worse, good


def together(verdicts: Sequence[GuardVerdict]) -> GuardVerdict:
    """Return what all guards say: one that stops decides, and all must pass. No guard is inconclusive."""
    decisions: tuple[Literal["stop", "inconclusive"], ...] = ("stop", "inconclusive")
    for decision in decisions:
        found = [verdict.sentence for verdict in verdicts if verdict.decision == decision]
        if found:
            return GuardVerdict(decision, "; ".join(found))
    if not verdicts:
        return GuardVerdict("inconclusive", "no guard looks at the candidate")
    return GuardVerdict("pass", "; ".join(verdict.sentence for verdict in verdicts))


def _numbers(guard: Guard, counts: Counts) -> str:
    if guard.ratio is None:
        return f"{counts.candidate_bad} {guard.event} in {counts.candidate} {guard.events}"
    return (
        f"{guard.event}: candidate {counts.candidate_bad} of {counts.candidate} "
        f"({_percent(counts.candidate_bad, counts.candidate)}), "
        f"stable {counts.stable_bad} of {counts.stable} ({_percent(counts.stable_bad, counts.stable)})"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "-"


def _times(log: float) -> str:
    """Return evidence as people read it: how many times more likely one explanation is."""
    if log > math.log(1e6):
        return "over a million"
    return f"{math.exp(log):.3g}" if log > -700 else "0"
