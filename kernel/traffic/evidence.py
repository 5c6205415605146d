"""Evidence from counts of bad events that may be looked at after every request. Pure.

A rollout sends the share w of the requests to a candidate. If the candidate is as good as the stable version, each bad
event, wherever it occurs, is the candidate's with probability w, however often events occur. If events are r times as
frequent with the candidate, it is theta(r, w) = r w / (r w + 1 - w). So only bad events are looked at, and their
likelihood ratio is a martingale: by Ville's inequality it exceeds 1/alpha with a probability of at most alpha, however
often one looks (Ville 1939; Johari et al., "Always valid inference", 2022). An average of such ratios over several r is
one again. Evidence is the natural logarithm of such an average.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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
