"""How long to wait before a worker is started again. Pure."""

from __future__ import annotations

#: Waits before the second, third, … attempt in a row that came to nothing. The first is at once.
DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class Backoff:
    """Counts workers that died without having been of use."""

    def __init__(self) -> None:
        self._failures = 0

    def useful(self) -> None:
        """The worker executed a batch: its death is not the start of a series."""
        self._failures = 0

    def next_delay_s(self) -> float:
        """Return the wait before the next attempt, and count it."""
        delay = DELAYS_S[min(self._failures, len(DELAYS_S) - 1)]
        self._failures += 1
        return delay
