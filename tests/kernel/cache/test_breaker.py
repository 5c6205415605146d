"""The circuit breaker: when a store that fails is asked again."""

from __future__ import annotations

from kernel.cache.breaker import FAILURE_LIMIT, FIRST_PAUSE_NS, LONGEST_PAUSE_NS, CircuitBreaker


def failed_breaker(now_ns: int = 0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    told = [breaker.failed(now_ns) for _ in range(FAILURE_LIMIT)]
    assert told == [False] * (FAILURE_LIMIT - 1) + [True]
    return breaker


def test_failures_with_a_success_between_them_do_not_stop_calls() -> None:
    breaker = CircuitBreaker()
    for _ in range(3 * FAILURE_LIMIT):
        assert breaker.allows(0)
        assert not breaker.failed(0)
        assert not breaker.succeeded()


def test_after_failures_in_a_row_no_call_is_made_for_a_time_and_then_one() -> None:
    breaker = failed_breaker(5)
    assert breaker.paused
    assert not breaker.allows(5 + FIRST_PAUSE_NS - 1)
    assert breaker.allows(5 + FIRST_PAUSE_NS)
    assert not breaker.allows(5 + FIRST_PAUSE_NS), "one call tries, the others wait for its result"


def test_a_try_that_succeeds_lets_all_calls_pass() -> None:
    breaker = failed_breaker()
    assert breaker.allows(FIRST_PAUSE_NS)
    assert breaker.succeeded()
    assert not breaker.paused
    assert breaker.allows(FIRST_PAUSE_NS)
    assert breaker.allows(FIRST_PAUSE_NS)


def test_each_try_that_fails_doubles_the_time_up_to_a_limit() -> None:
    breaker, now_ns, pauses = failed_breaker(), 0, []
    for _ in range(8):
        pause_ns = next(ns for ns in (FIRST_PAUSE_NS << i for i in range(10)) if breaker_allows(breaker, now_ns, ns))
        pauses.append(pause_ns)
        now_ns += min(pause_ns, LONGEST_PAUSE_NS)
        assert not breaker.failed(now_ns)
    assert pauses[:4] == [FIRST_PAUSE_NS, 2 * FIRST_PAUSE_NS, 4 * FIRST_PAUSE_NS, 8 * FIRST_PAUSE_NS]
    assert pauses[-1] == pauses[-2], "the time does not grow for ever"


def breaker_allows(breaker: CircuitBreaker, now_ns: int, pause_ns: int) -> bool:
    return breaker.allows(now_ns + min(pause_ns, LONGEST_PAUSE_NS))


def test_a_call_from_before_the_pause_that_fails_late_changes_nothing() -> None:
    breaker = failed_breaker()
    assert not breaker.failed(10)
    assert breaker.allows(FIRST_PAUSE_NS)
