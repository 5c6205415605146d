"""How much of what a worker prints is logged: a rate for lines and one for bytes, each with a burst. Pure."""

from __future__ import annotations

import msgspec

#: A worker that has been quiet may print what its rates allow for this many seconds at once.
BURST_S = 10

_NS = 1_000_000_000


class OutputLimits(msgspec.Struct, frozen=True):
    """The rates of one worker; 0 for no limit."""

    lines_per_s: int = 1000
    bytes_per_s: int = 1 << 20


class _Allowance:
    """A number that grows with time up to a limit (a token bucket)."""

    def __init__(self, rate_per_s: int, now_ns: int) -> None:
        self._rate_per_s = rate_per_s
        self._left: float = rate_per_s * BURST_S
        self._at_ns = now_ns

    def left(self, now_ns: int) -> bool:
        """Whether anything is left; always, without a rate."""
        grown = (now_ns - self._at_ns) * self._rate_per_s / _NS
        self._left = min(self._left + grown, self._rate_per_s * BURST_S)
        self._at_ns = now_ns
        return self._left >= 1 or not self._rate_per_s

    def spend(self, count: int) -> None:
        """Take `count`, also if less is left: then it takes longer until something is left again."""
        self._left -= count


class OutputAllowance:
    """What a worker may still print now."""

    def __init__(self, limits: OutputLimits, now_ns: int) -> None:
        self._lines = _Allowance(limits.lines_per_s, now_ns)
        self._bytes = _Allowance(limits.bytes_per_s, now_ns)

    def take(self, byte_size: int, now_ns: int) -> bool:
        """Whether a line of `byte_size` bytes may be logged; if so, it counts."""
        if not (self._lines.left(now_ns) and self._bytes.left(now_ns)):
            return False
        self._lines.spend(1)
        self._bytes.spend(byte_size)
        return True
