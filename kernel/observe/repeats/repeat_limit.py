"""Which lines of the log are left out because they repeat. Pure.

Each request can cause the same error: without a limit, thousands of lines each second fill the disk. The first lines
about a subject, such as a model, are logged in full. Then most are only counted, until they have become rare.
"""

from __future__ import annotations

#: Lines are counted for this time; then the log says how many were left out.
WINDOW_NS = 10_000_000_000

#: How many lines are logged in full: in the first window, and in one that follows a window with more lines than that.
FIRST_LINES, LATER_LINES = 10, 1

#: The most subjects that are counted apart.
_MOST_SUBJECTS = 1000
_OTHERS = "others"


class _Window:
    """The lines about one subject, for a time."""

    __slots__ = ("left_out", "room", "until_ns")

    def __init__(self, now_ns: int, room: int) -> None:
        self.until_ns = now_ns + WINDOW_NS
        self.room = room
        self.left_out = 0


class RepeatLimit:
    """The lines of one place in the code, by subject."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def take(self, subject: str, now_ns: int) -> bool:
        """Count a line at `now_ns`, in monotonic nanoseconds. Returns whether to log it. Call `ended` before."""
        windows = self._windows
        if subject not in windows and len(windows) >= _MOST_SUBJECTS:
            subject = _OTHERS
        window = windows.get(subject)
        if window is None:
            window = windows[subject] = _Window(now_ns, FIRST_LINES)
        if not window.room:
            window.left_out += 1
            return False
        window.room -= 1
        return True

    def ended(self, now_ns: int) -> list[tuple[str, int]]:
        """End windows that are over. Returns their subjects and how many lines were left out, where any were."""
        found: list[tuple[str, int]] = []
        for subject, window in list(self._windows.items()):
            if now_ns < window.until_ns:
                continue
            del self._windows[subject]
            if window.left_out:
                found.append((subject, window.left_out))
                self._windows[subject] = _Window(now_ns, LATER_LINES)
        return found
