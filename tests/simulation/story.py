"""The story of a run: what happened, in plain lines. Lines are written only when somebody reads them."""

from __future__ import annotations


class Story:
    """Events in their order."""

    def __init__(self) -> None:
        self._events: list[tuple[int, str, tuple[object, ...]]] = []
        self.start_ns = 0

    def begin(self, now_ns: int) -> None:
        """Count times from `now_ns`."""
        self.start_ns = now_ns

    def tell(self, now_ns: int, text: str, *values: object) -> None:
        """Add an event: `text` has a `%s` for each of `values`."""
        self._events.append((now_ns, text, values))

    def lines(self, last: int = 0) -> list[str]:
        """Return the lines, or only the `last` of them."""
        return [
            f"{(at_ns - self.start_ns) / 1e6:9.3f} ms  {text % values if values else text}"
            for at_ns, text, values in self._events[-last:]
        ]

    def __len__(self) -> int:
        return len(self._events)
