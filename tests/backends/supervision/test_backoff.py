"""When a dead worker is started again."""

from __future__ import annotations

from backends.supervision.backoff import DELAYS_S, Backoff


def test_the_first_restart_is_at_once_and_later_ones_wait_longer() -> None:
    backoff = Backoff()
    delays = [backoff.next_delay_s() for _ in range(len(DELAYS_S) + 1)]
    assert delays == [*DELAYS_S, DELAYS_S[-1]]
    assert delays[0] == 0


def test_a_useful_worker_ends_the_series() -> None:
    backoff = Backoff()
    backoff.next_delay_s()
    backoff.next_delay_s()
    backoff.reset()
    assert backoff.next_delay_s() == 0
