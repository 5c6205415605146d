"""The most requests that each step executes at the same time.

Streams that may wait for themselves.
"""

from __future__ import annotations

from kernel.config.spec import EnsembleSpec
from kernel.loop.clock import ITERATION_END
from schedulers.ensemble.plan import EnsemblePlan
from schedulers.ensemble.waits import (
    LONGEST_STALL_NS,
    LONGEST_WAIT_NS,
    MOST_STARTED,
    StalledStreams,
    StepLimits,
    feeding_themselves,
)
from schedulers.testing import KernelLab, spec_of, step


def started(limits: StepLimits[str]) -> list[str]:
    """Return the calls that have waited and start in this iteration, and end the iteration."""
    found = list(iter(limits.next_call, None))
    assert limits.begin_iteration(0) == []
    return [each for each in found if each is not None]


def test_calls_above_the_limit_wait_in_order() -> None:
    limits = StepLimits[str](2, 1)
    assert [limits.start(0, call, 0) for call in "abcd"] == [True, True, False, False]
    assert started(limits) == []
    limits.ended(0)
    assert started(limits) == ["c"]
    limits.ended(0)
    limits.ended(0)
    assert started(limits) == ["d"]
    assert limits.start(0, "e", 0)
    limits.check()


def test_each_step_has_a_limit_of_its_own() -> None:
    limits = StepLimits[str](1, 2)
    assert limits.start(0, "a", 0)
    assert limits.start(1, "b", 0)
    assert not limits.start(1, "c", 0)
    limits.ended(0)
    assert started(limits) == []
    limits.check()


def test_a_call_that_is_removed_does_not_start() -> None:
    limits = StepLimits[str](1, 1)
    limits.start(0, "a", 0)
    limits.start(0, "b", 0)
    limits.remove(0, "b")
    limits.ended(0)
    assert started(limits) == []
    limits.check()


def test_a_call_that_was_to_start_next_and_is_removed_lets_another_one_start() -> None:
    limits = StepLimits[str](1, 1)
    for call in "abc":
        limits.start(0, call, 0)
    limits.ended(0)
    limits.remove(0, "b")
    limits.check()
    assert started(limits) == ["c"]


def test_one_iteration_starts_only_some_of_those_that_have_waited() -> None:
    limits = StepLimits[str](1, 1)
    calls = [str(number) for number in range(MOST_STARTED + 3)]
    for call in ("", *calls):
        limits.start(0, call, 0)
    found = []
    limits.ended(0)
    while (following := limits.next_call()) is not None:
        found.append(following)
        assert limits.until_ns == ITERATION_END
        limits.ended(0)
    assert found == calls[:MOST_STARTED]
    assert limits.begin_iteration(0) == []
    assert limits.next_call() == calls[MOST_STARTED]
    limits.check()


def test_a_call_that_has_waited_too_long_starts_above_the_limit() -> None:
    limits = StepLimits[str](1, 1)
    limits.start(0, "a", 0)
    assert limits.until_ns is None
    limits.start(0, "b", 5)
    limits.start(0, "c", 9)
    assert limits.until_ns == 5 + LONGEST_WAIT_NS
    assert limits.begin_iteration(4 + LONGEST_WAIT_NS) == []
    assert limits.begin_iteration(5 + LONGEST_WAIT_NS) == [0]
    assert started(limits) == ["b"]
    limits.ended(0)
    assert started(limits) == [], "one above the limit is still running"
    limits.ended(0)
    assert started(limits) == ["c"]
    limits.check()


def test_of_many_calls_that_have_waited_too_long_only_some_start_in_one_iteration() -> None:
    limits = StepLimits[str](1, 1)
    for number in range(MOST_STARTED + 3):
        limits.start(0, str(number), 0)
    assert len(limits.begin_iteration(LONGEST_WAIT_NS)) == MOST_STARTED
    assert limits.until_ns == ITERATION_END
    assert len(started(limits)) == MOST_STARTED
    assert limits.begin_iteration(LONGEST_WAIT_NS) == [0, 0]
    limits.check()


def test_requests_that_stand_still_are_found_one_after_the_other() -> None:
    streams = StalledStreams[str]()
    assert streams.until_ns is None
    streams.moved("a", 0)
    streams.moved("b", 5)
    streams.moved("a", 7)
    assert streams.until_ns == 5 + LONGEST_STALL_NS
    assert streams.overdue(4 + LONGEST_STALL_NS) == []
    assert streams.overdue(7 + LONGEST_STALL_NS) == ["b", "a"]
    assert streams.until_ns == 7 + 2 * LONGEST_STALL_NS, "they are found again after the same time"
    streams.remove("a")
    streams.remove("b")
    streams.remove("b")
    assert streams.until_ns is None


def found(lab: KernelLab, *models: str) -> frozenset[int]:
    """Return the steps of a chain of these models whose responses their own model needs."""
    tensors = ["A", *(f"t{number}" for number in range(1, len(models))), "Z"]
    steps = tuple(
        step(name, {"IN": source}, {"OUT": target})
        for name, source, target in zip(models, tensors, tensors[1:], strict=False)
    )
    ensemble = EnsembleSpec(steps)
    plan = EnsemblePlan(spec_of("e", "A", "Z", decoupled=True, ensemble=ensemble), ensemble)
    return feeding_themselves(plan, [lab.catalog.resolve(name) for name in models], lab.catalog.resolve)


def test_a_stream_feeds_itself_if_a_step_behind_it_needs_the_same_model_directly_or_in_an_ensemble() -> None:
    lab = KernelLab()
    lab.add(spec_of("m", "IN", "OUT"))
    for name in ("s", "t"):
        lab.add(spec_of(name, "IN", "OUT", decoupled=True))
    inner = EnsembleSpec((step("m", {"IN": "IN"}, {"OUT": "b"}), step("s", {"IN": "b"}, {"OUT": "OUT"})))
    lab.add(spec_of("inner", "IN", "OUT", decoupled=True, ensemble=inner))
    assert found(lab, "s", "m") == frozenset()
    assert found(lab, "s", "t") == frozenset()
    assert found(lab, "s", "m", "s") == {0}
    assert found(lab, "s", "m", "inner") == {0}
    assert found(lab, "inner", "m") == {0}, "a nested ensemble that streams counts as all its models"
    assert found(lab, "m", "s", "m") == frozenset()
