"""The most requests that each step executes at the same time."""

from __future__ import annotations

from schedulers.ensemble.step_limits import LONGEST_WAIT_NS, StepLimits


def test_calls_above_the_limit_wait_in_order() -> None:
    limits = StepLimits[str](2, 1)
    assert [limits.start(0, call, 0) for call in "abcd"] == [True, True, False, False]
    assert limits.ended(0) == "c"
    assert limits.ended(0) == "d"
    assert limits.ended(0) is None
    assert limits.start(0, "e", 0)
    limits.check()


def test_each_step_has_a_limit_of_its_own() -> None:
    limits = StepLimits[str](1, 2)
    assert limits.start(0, "a", 0)
    assert limits.start(1, "b", 0)
    assert not limits.start(1, "c", 0)
    assert limits.ended(0) is None
    limits.check()


def test_a_call_that_is_removed_does_not_start() -> None:
    limits = StepLimits[str](1, 1)
    limits.start(0, "a", 0)
    limits.start(0, "b", 0)
    assert limits.remove(0, "b")
    assert not limits.remove(0, "a")
    assert limits.ended(0) is None
    limits.check()


def test_a_call_that_has_waited_too_long_starts_above_the_limit() -> None:
    limits = StepLimits[str](1, 1)
    limits.start(0, "a", 0)
    assert limits.until_ns is None
    limits.start(0, "b", 5)
    limits.start(0, "c", 9)
    assert limits.until_ns == 5 + LONGEST_WAIT_NS
    assert limits.overdue(4 + LONGEST_WAIT_NS, 10) == []
    assert limits.overdue(5 + LONGEST_WAIT_NS, 10) == [(0, "b")]
    assert limits.ended(0) is None, "one above the limit is still running"
    assert limits.ended(0) == "c"
    limits.check()
