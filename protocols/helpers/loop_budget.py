"""How long the event loop may work on messages of medium size; what takes longer is a helper's work. Pure.

The way to a helper and back takes the loop some 0.2 ms, and twice as long with a large message: that is longer than to
decode a thousand numbers. So a message goes to a helper because of the time that it takes, and not because of its size.
"""

from __future__ import annotations

#: Work that takes the loop less time than the way to a helper. It is never sent there.
FREE_US = 150.0

#: Longer work is given to a helper that is idle if there are other requests: it is done at the same time as theirs.
SHARED_US = 500.0

#: The longest piece of work, and all of it in one event-loop iteration, except for what is free.
ITERATION_US = 2000.0

#: All of it in an iteration while no helper has started yet, which takes much longer.
UNAIDED_ITERATION_US = 8000.0


class LoopBudget:
    """The budget of all connections of a front door, in microseconds as they were estimated beforehand."""

    __slots__ = ("_used_us",)

    def __init__(self) -> None:
        self._used_us = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was taken in this iteration: then `reset` must be called at its end once something is."""
        return not self._used_us

    def take(self, cost_us: float, *, unaided: bool = False) -> bool:
        """Return whether work that takes `cost_us` may be done now; it counts then.

        `unaided`: no helper has started.
        """
        if cost_us <= FREE_US:
            return True
        limit_us = UNAIDED_ITERATION_US if unaided else ITERATION_US
        if cost_us > ITERATION_US or self._used_us + cost_us > limit_us:
            return False
        self._used_us += cost_us
        return True

    def reset(self) -> None:
        """Another iteration begins."""
        self._used_us = 0.0
