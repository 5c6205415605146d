"""How many bytes of large messages a front door moves in one event-loop iteration, in both directions. Pure.

A socket takes and gives megabytes at once, for as long as its peer keeps up, and the first access to a page of shared
memory takes long. Without a limit, clients of large messages block an iteration for tens of milliseconds each.
"""

from __future__ import annotations

#: Bytes in an iteration: about 1 ms, and a request waits for two or three iterations. A tensor of 1 MiB leaves in one
#: piece with what is around it. When the bytes are used up, each connection gets a little, and pauses.
ITERATION_BYTE_SIZE = (1 << 20) + (64 << 10)
_LEAST_BYTE_SIZE = 16 << 10

#: A read of this size counts, whatever it is a part of: the socket may have more.
COUNTED_READ_BYTE_SIZE = _LEAST_BYTE_SIZE


class IterationBudget:
    """The budget of all connections of a front door."""

    __slots__ = ("_used",)

    def __init__(self) -> None:
        self._used = 0

    @property
    def room(self) -> int:
        """How many bytes a connection may receive or send now."""
        return max(ITERATION_BYTE_SIZE - self._used, _LEAST_BYTE_SIZE)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was moved in this iteration: then `reset` must be called at its end."""
        return not self._used

    def moved(self, byte_size: int) -> bool:
        """Count received or sent bytes. Returns whether the connection is to pause until the next iteration."""
        self._used += byte_size
        return self._used >= ITERATION_BYTE_SIZE

    def reset(self) -> None:
        """Another iteration begins."""
        self._used = 0
