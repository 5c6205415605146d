"""The decider against patterns of arrivals: what it costs in instances, and what clients wait."""

from __future__ import annotations

import heapq
import math
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.config.model_parameters import AutoscaleSettings
from kernel.repository.autoscaling import Autoscaler, LoadSample

if TYPE_CHECKING:
    from collections.abc import Callable

S = 10**9
#: An execution takes 40 ms: an instance can execute 25 requests a second.
EXECUTION_NS = 40 * 10**6
#: A new instance is ready after 2 s.
LOAD_NS = 2 * S


def bursts(second: int) -> float:
    """Every two minutes a burst of 20 s with what three instances can do."""
    return 75 if second % 120 < 20 else 2


def daily_wave(second: int) -> float:
    """A day in half an hour: from nearly nothing to what four instances can do."""
    return 50 - 48 * math.cos(second / 1800 * 2 * math.pi)


def on_off(second: int) -> float:
    """Ten minutes of steady load for two instances, then nothing."""
    return 40 if second % 1200 < 600 else 0


def steady(second: int) -> float:
    """Four fifths of what one instance can do."""
    return 20


class Outcome(msgspec.Struct):
    """What became of a pattern."""

    waits_s: list[float]
    #: (second, count) of each change.
    changes: list[tuple[float, int]]
    instance_seconds: float

    def wait_s(self, part: float) -> float:
        """Return the wait that this part of all requests does not exceed."""
        return sorted(self.waits_s)[int(part * (len(self.waits_s) - 1))]

    @property
    def most(self) -> int:
        return max((count for _, count in self.changes), default=1)


def served(pattern: Callable[[int], float], seconds: int, settings: AutoscaleSettings) -> Outcome:
    """Serve a pattern with a queue and as many instances as the decider wants. No request is lost."""
    random = Random(7)
    arrivals = [
        int((second + random.random()) * S)
        for second in range(seconds)
        for _ in range(_poisson(random, pattern(second)))
    ]
    arrivals.sort()
    decider = Autoscaler(settings, settings.min)
    outcome = Outcome([], [], 0)
    waiting: list[int] = []
    ends: list[int] = []  # of executions
    count, ready_ns, wanted, index, now_ns = settings.min, 0, settings.min, 0, 0
    while index < len(arrivals) or waiting or ends or now_ns < seconds * S:
        now_ns += decider.interval_ns
        outcome.instance_seconds += count * decider.interval_ns / S
        while True:  # all that happens until the next sample, in order
            arrival_ns = arrivals[index] if index < len(arrivals) else now_ns + 1
            end_ns = ends[0] if ends else now_ns + 1
            event_ns = min(arrival_ns, end_ns)
            if event_ns > now_ns:
                break
            if arrival_ns <= end_ns:
                waiting.append(arrival_ns)
                index += 1
            else:
                heapq.heappop(ends)
            while waiting and len(ends) < count:
                outcome.waits_s.append((event_ns - waiting[0]) / S)
                waiting.pop(0)
                heapq.heappush(ends, event_ns + EXECUTION_NS)
        if wanted != count and now_ns >= ready_ns:  # the driver takes no samples while instances start
            decider.changed(wanted)
            outcome.changes.append((now_ns / S, wanted))
            count = wanted
        elif wanted == count:
            free = max(0, count - len(ends))
            wanted = decider.look(LoadSample(now_ns, len(waiting), count, free, free))
            ready_ns = now_ns + (LOAD_NS if wanted > count else 0)
    assert len(outcome.waits_s) == len(arrivals)
    return outcome


def _poisson(random: Random, mean: float) -> int:
    limit, product, count = math.exp(-mean), random.random(), 0
    while product > limit:
        product *= random.random()
        count += 1
    return count


SETTINGS = AutoscaleSettings(6, 1, 500 * 10**6, 30 * S)


def test_bursts_are_served_by_more_instances_which_go_away_between_them() -> None:
    scaled = served(bursts, 1200, SETTINGS)
    fixed = served(bursts, 1200, AutoscaleSettings(1))
    assert scaled.most >= 3
    assert scaled.wait_s(0.95) < 4, "the first seconds of a burst, until new instances are ready"
    assert fixed.wait_s(0.95) > 30
    assert scaled.instance_seconds < 0.75 * 6 * 1200


def test_a_daily_wave_is_followed_up_and_down_without_flapping() -> None:
    outcome = served(daily_wave, 1800, SETTINGS)
    assert outcome.most >= 4
    assert outcome.changes[-1][1] <= 2
    assert outcome.wait_s(0.99) < 3
    assert len(outcome.changes) < 40
    assert outcome.instance_seconds < 1800 * 5


def test_when_the_load_ends_all_but_the_fewest_instances_end() -> None:
    outcome = served(on_off, 2400, SETTINGS)
    ends = [count for second, count in outcome.changes if 600 < second < 1200]
    assert ends[-1] == 1
    assert outcome.wait_s(0.98) < 3


def test_a_steady_load_changes_nothing_for_long() -> None:
    outcome = served(steady, 1800, SETTINGS)
    assert outcome.most <= 2
    assert len(outcome.changes) <= 6


@pytest.mark.parametrize("pattern", [bursts, daily_wave, on_off, steady])
def test_the_bounds_hold(pattern: Callable[[int], float]) -> None:
    settings = AutoscaleSettings(3, 2, 200 * 10**6, 5 * S)
    outcome = served(pattern, 600, settings)
    assert {count for _, count in outcome.changes} <= {2, 3}
