"""What a worker may print: a rate with a burst, for lines and for bytes."""

from __future__ import annotations

from backends.supervision.output.limits import BURST_S, OutputAllowance, OutputLimits

S = 1_000_000_000


def taken(allowance: OutputAllowance, now_ns: int, byte_size: int = 1, most: int = 1000) -> int:
    """Return how many lines are allowed now."""
    count = 0
    while count < most and allowance.take(byte_size, now_ns):
        count += 1
    return count


def test_a_quiet_worker_has_a_burst_and_then_the_rate() -> None:
    allowance = OutputAllowance(OutputLimits(lines_per_s=5, bytes_per_s=0), 0)
    assert taken(allowance, 0) == 5 * BURST_S
    assert taken(allowance, S // 10) == 0
    assert taken(allowance, S) == 5
    assert taken(allowance, 2 * S) == 5
    assert taken(allowance, 1000 * S) == 5 * BURST_S


def test_a_line_may_exceed_the_bytes_that_are_left_and_is_paid_later() -> None:
    allowance = OutputAllowance(OutputLimits(lines_per_s=0, bytes_per_s=10), 0)
    assert taken(allowance, 0, byte_size=150) == 1
    assert taken(allowance, 5 * S) == 0
    assert taken(allowance, 6 * S) == 10


def test_without_rates_there_is_no_limit() -> None:
    assert taken(OutputAllowance(OutputLimits(0, 0), 0), 0, byte_size=1 << 40) == 1000
