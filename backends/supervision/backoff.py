"""The delay before a worker is restarted. Pure."""

from __future__ import annotations

#: Delays in seconds: before the first restart, and before each next one after failed attempts in a row.
DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class Backoff:
    """Counts workers in a row that died before they executed a batch."""

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        """A worker has executed a batch: the next restart is without delay."""
        self._failures = 0

    def next_delay_s(self) -> float:
        """Return the delay before the next attempt in seconds, and count the attempt."""
        delay = DELAYS_S[min(self._failures, len(DELAYS_S) - 1)]
        self._failures += 1
        return delay
