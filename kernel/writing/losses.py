"""What was lost before a helper could write it, and which losses the log has: the first of each cause at once, then
now and then. Pure."""

from __future__ import annotations

#: How often losses for one cause are logged, in seconds.
REPORT_S = 60.0


class _Cause:
    """Losses for one cause."""

    __slots__ = ("reported_s", "unreported", "why")

    def __init__(self) -> None:
        self.reported_s = -REPORT_S
        #: How many the log does not have yet, and why the last of them was lost.
        self.unreported = 0
        self.why = ""


class Losses:
    """Counts losses by cause: a collector that is down also fills the queue, and the log has both."""

    def __init__(self, one: str, many: str) -> None:
        """`one` and `many` are subject and verb of the lines, such as "trace was" and "traces were"."""
        self._one, self._many = one, many
        self._causes: dict[str, _Cause] = {}
        #: How many were lost.
        self.count = 0

    def add(self, count: int, why: str, now_s: float, *, cause: str = "") -> list[str]:
        """Count losses at `now_s`, in monotonic seconds. Returns the lines to log.

        `cause` stands for all texts of `why` that have the same cause; without it, each text is a cause.
        """
        if not count:
            return []
        self.count += count
        found = self._causes.setdefault(cause or why, _Cause())
        found.unreported += count
        found.why = why
        if now_s - found.reported_s < REPORT_S:
            return []
        found.reported_s = now_s
        return self._lines([found])

    def rest(self) -> list[str]:
        """Return the lines about all that was lost and was not logged."""
        return self._lines([cause for cause in self._causes.values() if cause.unreported])

    def _lines(self, causes: list[_Cause]) -> list[str]:
        lines = [f"{each.unreported} {self._one if each.unreported == 1 else self._many} lost: {each.why}"
                 for each in causes]  # fmt: skip
        for each in causes:
            each.unreported = 0
        return lines
