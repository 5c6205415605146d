"""How often the verdicts of rollouts are wrong, and when they come: simulated traffic, and the table of the documents.

Each run is a rollout of 20,000 requests, of which the candidate gets one share. The verdicts are the server's,
with the settings that are the default, looked at every 100 requests. At a share of 100 % there is no stable version
beside it: what counts are its errors in a step of 50 % before, if there was one.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import TYPE_CHECKING

import msgspec

from kernel.traffic.rollout_states import RolloutSettings
from kernel.traffic.rollout_trial import judge_alone
from kernel.traffic.verdicts import ERRORS, LATENCY, OUTPUTS, BadEvents, Counts, judge, together

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 20_000
LOOK = 100
RUNS = 2000

#: How many requests the candidate has executed at least when a step ends.
_LEAST_REQUESTS = RolloutSettings(to=1).least_requests


class SimulatedRow(msgspec.Struct, frozen=True):
    """Rates of bad events of the stable version and of the candidate, by guard; of outputs the rate of pairs."""

    title: str
    errors: tuple[float, float] = (0.005, 0.005)
    slow: tuple[float, float] = (0.01, 0.01)
    outputs: float | None = None
    #: The candidate's share of the requests.
    share: float = 0.1
    requests: int = REQUESTS
    #: At a share of 100 %: how many requests the stable version has executed in the steps before.
    before: int = 0


#: As slow as 1.2 and 1.5 times the stable version, log-normal with a sigma of 0.5, where 1 % of it counts as slow.
_SLOWER_1_2, _SLOWER_1_5 = 0.025, 0.065

ROWS = (
    SimulatedRow("as good, 0.5 % errors"),
    SimulatedRow("as good, 5 % errors", errors=(0.05, 0.05)),
    SimulatedRow("as good, 0.1 % errors", errors=(0.001, 0.001)),
    SimulatedRow("as good, 0.5 % errors, share 50 %", share=0.5),
    SimulatedRow("errors 0.5 % to 1 %", errors=(0.005, 0.01)),
    SimulatedRow("errors 0.5 % to 2 %", errors=(0.005, 0.02)),
    SimulatedRow("errors 0.5 % to 2 %, share 1 %", errors=(0.005, 0.02), share=0.01, requests=2 * REQUESTS),
    SimulatedRow("errors 0.5 % to 2 %, share 50 %", errors=(0.005, 0.02), share=0.5),
    SimulatedRow("errors 0.5 % to 10 %", errors=(0.005, 0.1)),
    SimulatedRow("errors 0.5 % to 50 %", errors=(0.005, 0.5)),
    SimulatedRow("1.2 times slower", slow=(0.01, _SLOWER_1_2)),
    SimulatedRow("1.5 times slower", slow=(0.01, _SLOWER_1_5)),
    SimulatedRow("at 100 %: as good, 0.5 % errors", share=1, before=5000),
    SimulatedRow("at 100 %: as good, 5 % errors", errors=(0.05, 0.05), share=1, before=5000),
    SimulatedRow("at 100 %: as good, 0.5 % errors, 300 requests before", share=1, before=300),
    SimulatedRow("at 100 %: errors 0.5 % to 2 %", errors=(0.005, 0.02), share=1, before=5000),
    SimulatedRow("at 100 %: errors 0.5 % to 10 %", errors=(0.005, 0.1), share=1, before=5000),
    SimulatedRow("at 100 %: errors 5 % to 20 %", errors=(0.05, 0.2), share=1, before=5000),
    SimulatedRow("at 100 %, no step before: 0.5 % errors", share=1),
    SimulatedRow("at 100 %, no step before: 2 % errors", errors=(0.005, 0.02), share=1),
    SimulatedRow("at 100 %, no step before: 20 % errors", errors=(0.005, 0.2), share=1),
    SimulatedRow("1 of 1,000 pairs differs, the bound", outputs=0.001),
    SimulatedRow("1 of 200 pairs differs", outputs=0.005),
)


class SimulatedRollout(msgspec.Struct, frozen=True):
    """How one run ended: `stop`, `pass` or `inconclusive`, and after how many requests, or pairs."""

    decision: str
    requests: int


def _next(rate: float, random_: random.Random) -> int:
    """Return after how many requests the next bad event comes."""
    return int(math.log(1 - random_.random()) / math.log(1 - rate)) + 1


def _events(rate: float, count: int, random_: random.Random) -> Iterator[int]:
    """Yield the numbers of the requests, of `count`, that are bad."""
    place = _next(rate, random_)
    while place <= count:
        yield place
        place += _next(rate, random_)


def simulate(row: SimulatedRow, seed: int) -> SimulatedRollout:
    """Return the outcome of one rollout."""
    random_ = random.Random(f"{row.title} {seed}")
    if row.outputs is not None:
        return _simulate_pairs(row, row.outputs, random_)
    if row.share == 1:
        return _simulate_alone(row, random_)
    pairs = ((ERRORS, row.errors), (LATENCY, row.slow))
    counts = {guard.name: Counts(bad=[BadEvents(row.share)]) for guard, _ in pairs}
    bad = sorted(
        (place, guard.name, side)
        for guard, rates in pairs
        for side, rate, share in (("stable", rates[0], 1 - row.share), ("candidate", rates[1], row.share))
        for place in _events(rate * share, row.requests, random_)
    )
    passed, position = 0, 0
    for looked in range(LOOK, row.requests + 1, LOOK):
        changed = False
        while position < len(bad) and bad[position][0] <= looked:
            _, name, side = bad[position]
            events = counts[name].bad[0]
            events.candidate += side == "candidate"
            events.stable += side == "stable"
            position += 1
            changed = True
        for each in counts.values():
            each.candidate, each.stable = round(looked * row.share), round(looked * (1 - row.share))
        if not changed and passed:
            continue
        verdict = together([judge(guard, counts[guard.name]) for guard, _ in pairs])
        if verdict.decision == "stop":
            return SimulatedRollout("stop", looked)
        if verdict.decision == "pass" and not passed:
            passed = looked
    return SimulatedRollout("pass", passed) if passed else SimulatedRollout("inconclusive", row.requests)


def _simulate_pairs(row: SimulatedRow, rate: float, random_: random.Random) -> SimulatedRollout:
    bad = list(_events(rate, row.requests, random_))
    passed = 0
    for looked in range(LOOK, row.requests + 1, LOOK):
        counts = Counts([BadEvents(0.5, candidate=sum(place <= looked for place in bad))], candidate=looked)
        decision = judge(OUTPUTS, counts).decision
        if decision == "stop":
            return SimulatedRollout("stop", looked)
        if decision == "pass" and not passed:
            passed = looked
    return SimulatedRollout("pass", passed) if passed else SimulatedRollout("inconclusive", row.requests)


def _simulate_alone(row: SimulatedRow, random_: random.Random) -> SimulatedRollout:
    before = None
    if row.before:
        stable_bad = sum(1 for _ in _events(row.errors[0], row.before, random_))
        before = Counts([BadEvents(0.5, stable=stable_bad)], stable=row.before)
    bad = list(_events(row.errors[1], row.requests, random_))
    passed, count = 0, 0
    for looked in range(LOOK, row.requests + 1, LOOK):
        while count < len(bad) and bad[count] <= looked:
            count += 1
        decision = judge_alone(Counts([BadEvents(1.0, candidate=count)], candidate=looked), before).decision
        if decision == "stop":
            return SimulatedRollout("stop", looked)
        if decision == "pass" and not passed and looked >= _LEAST_REQUESTS:
            passed = looked
    return SimulatedRollout("pass", passed) if passed else SimulatedRollout("inconclusive", row.requests)


def line(row: SimulatedRow, outcomes: list[SimulatedRollout]) -> str:
    """Return the line of the table for the outcomes of a row."""

    def part(decision: str) -> tuple[str, str]:
        found = [each.requests for each in outcomes if each.decision == decision]
        share = 100 * len(found) / len(outcomes)
        return f"{share:.1f} %", f"{statistics.median(found):,.0f}" if len(found) * 20 >= len(outcomes) else "-"

    stopped, after = part("stop")
    times = sorted(each.requests for each in outcomes if each.decision == "stop")
    most = math.ceil(0.98 * len(outcomes)) - 1  # the place of the run after which 98 % of all were stopped
    all_after = f"{times[most]:,}" if len(times) > most else "-"
    passed, passed_after = part("pass")
    return (
        f"| {row.title} | {stopped} | {after} | {all_after} | {passed} | {passed_after} | {part('inconclusive')[0]} |"
    )


def print_table(runs: int, only: str = "") -> None:
    """Simulate all rows and print the table of docs/traffic.md."""
    print(f"{runs:,} runs a row")
    print("| candidate | stopped | after (median) | 98 % after | passed | after (median) | inconclusive |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in ROWS:
        if only in row.title:
            print(line(row, [simulate(row, seed) for seed in range(runs)]), flush=True)
