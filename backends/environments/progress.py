"""Lines of progress, not more often than a person wants to read them. Pure."""

from __future__ import annotations

#: The time between two lines that are not the first of their kind, in nanoseconds.
INTERVAL_NS = 5_000_000_000


class ShownLines:
    """Decides which lines are shown."""

    def __init__(self) -> None:
        self._shown_ns: int | None = None

    def shows(self, now_ns: int) -> bool:
        """Whether a line that comes now is shown: the first one, and then one in each interval."""
        if self._shown_ns is not None and now_ns - self._shown_ns < INTERVAL_NS:
            return False
        self._shown_ns = now_ns
        return True
