"""How many instances a model should have: the decisions, sample by sample."""

from __future__ import annotations

import itertools

from kernel.config.model_parameters import AutoscaleSettings
from kernel.repository.autoscaling import FIRST_PAUSE_NS, Autoscaler, LoadSample

MS, S = 10**6, 10**9
SETTINGS = AutoscaleSettings(8, 1, 500 * MS, 10 * S)


class Watched:
    """A decider whose decisions come true at once."""

    def __init__(self, count: int = 1, settings: AutoscaleSettings = SETTINGS) -> None:
        self.decider = Autoscaler(settings, count)
        self.now_ns = 0

    def look(self, waiting: int, free: int, idle: int, instances: int | None = None) -> int:
        """Take a sample, one interval after the last one."""
        self.now_ns += self.decider.interval_ns
        count = self.decider.count if instances is None else instances
        wanted = self.decider.look(LoadSample(self.now_ns, waiting, count, free, idle))
        if wanted != self.decider.count:
            self.decider.changed(wanted)
        return wanted

    def for_(self, ns: int, waiting: int, free: int, idle: int) -> list[int]:
        """Take samples for a time; returns the counts without repetitions."""
        counts = [self.look(waiting, free, idle) for _ in range(ns // self.decider.interval_ns)]
        return [count for index, count in enumerate(counts) if not index or counts[index - 1] != count]


def test_a_queue_that_stands_for_the_time_adds_an_instance() -> None:
    watched = Watched()
    assert watched.for_(500 * MS, waiting=3, free=0, idle=0) == [1]
    assert watched.look(waiting=1, free=0, idle=0) == 2


def test_a_queue_that_was_empty_or_had_a_free_instance_in_one_sample_does_not_stand() -> None:
    watched = Watched()
    for _ in range(20):
        watched.for_(450 * MS, waiting=3, free=0, idle=0)
        watched.look(waiting=0, free=0, idle=0)
        watched.for_(450 * MS, waiting=3, free=0, idle=0)
        watched.look(waiting=3, free=1, idle=0)
    assert watched.decider.count == 1


def test_a_queue_that_still_stands_adds_twice_as_many_up_to_the_maximum() -> None:
    assert Watched().for_(3 * S, waiting=100, free=0, idle=0) == [1, 2, 4, 8]


def test_after_a_pause_of_the_queue_one_is_added_again() -> None:
    watched = Watched()
    assert watched.for_(1200 * MS, waiting=100, free=0, idle=0) == [1, 2, 4]
    watched.look(waiting=0, free=0, idle=0)
    assert watched.for_(600 * MS, waiting=100, free=0, idle=0) == [4, 5]


def test_an_instance_that_is_never_needed_is_removed() -> None:
    watched = Watched(3)
    assert watched.for_(10 * S, waiting=0, free=1, idle=1) == [3]
    assert watched.look(waiting=0, free=1, idle=1) == 2
    assert watched.for_(9 * S, waiting=0, free=1, idle=1) == [2]


def test_an_instance_that_is_needed_now_and_then_stays() -> None:
    watched = Watched(3)
    for _ in range(10):
        watched.for_(9 * S, waiting=0, free=2, idle=2)
        watched.look(waiting=0, free=0, idle=0)
    assert watched.decider.count == 3


def test_of_many_idle_instances_half_are_removed_at_a_time_down_to_the_minimum() -> None:
    watched = Watched(8)
    counts = []
    for _ in range(8):
        idle = watched.decider.count
        counts += watched.for_(11 * S, waiting=0, free=idle, idle=idle)
    assert counts[0] == 8
    assert counts[-1] == 1
    assert counts == sorted(counts, reverse=True)
    assert 4 in counts


def test_a_lost_instance_is_no_reason_for_a_change() -> None:
    watched = Watched(2)
    for _ in range(100):
        assert watched.look(waiting=9, free=0, idle=0, instances=1) == 2
    assert watched.for_(500 * MS, waiting=9, free=0, idle=0) == [2], "the time begins when all are there"


def test_a_failed_start_is_tried_again_later_and_later() -> None:
    watched = Watched()
    starts = []
    for _ in range(60 * 20):
        watched.now_ns += watched.decider.interval_ns
        if watched.decider.look(LoadSample(watched.now_ns, 9, 1, 0, 0)) > 1:
            starts.append(watched.now_ns)
            watched.decider.failed(watched.now_ns)
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps[0] == FIRST_PAUSE_NS
    assert gaps[1] == 2 * FIRST_PAUSE_NS
    assert gaps == sorted(gaps)


def test_a_count_outside_of_the_bounds_is_corrected_at_once() -> None:
    watched = Watched(12)
    assert watched.look(waiting=0, free=0, idle=0) == 8


def test_samples_are_taken_often_enough_and_not_too_often() -> None:
    assert Autoscaler(AutoscaleSettings(2, 1, 1 * MS, S), 1).interval_ns == 10 * MS
    assert Autoscaler(AutoscaleSettings(2, 1, 600 * S, 600 * S), 1).interval_ns == 500 * MS
    assert Autoscaler(AutoscaleSettings(2, 1, 2 * S, S), 1).interval_ns == 100 * MS
