"""The watchdog: checks every instance from time to time, with one timer for the whole server.

It adds no work to requests and batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

from kernel.errors import failure_logged

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: The longest time between two looks in seconds, and the shortest.
LOOK_INTERVAL_S = 0.5
MIN_INTERVAL_S = 0.01

#: How many looks an execution that takes as long as its timeout gets at least.
_LOOKS_PER_TIMEOUT = 4


class Watched(Protocol):
    """What the watchdog looks at: the keeper of an instance."""

    @property
    def shortest_limit_s(self) -> float:
        """The shortest time after which something is to be done, in seconds; 0 for none."""

    def look(self, now_ns: int) -> None:
        """Check whether the instance makes progress. `now_ns` is the watchdog's time."""


class Watchdog:
    """Looks at those that were added, until they are removed.

    Its time stops while the event loop is blocked: what a worker has sent in that time is not read yet, and it
    must not seem to have done nothing.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        #: In the order in which they were added.
        self._watched: dict[Watched, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._time_ns = 0
        self._last_look_ns = 0
        self._interval_s = LOOK_INTERVAL_S

    def add(self, watched: Watched) -> None:
        """Look at `watched` from now on, also if its limit has changed."""
        if not self._watched:
            self._last_look_ns = self._now_ns()
        self._watched[watched] = None
        self._look_within(_wanted_interval_s(watched))

    def remove(self, watched: Watched) -> None:
        """Look at `watched` no more. It need not have been added."""
        self._watched.pop(watched, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_within(self, interval_s: float) -> None:
        if self._timer is not None:
            if interval_s >= self._interval_s:
                return  # a longer interval begins after the next look
            self._timer.cancel()
        self._interval_s = interval_s
        self._timer = asyncio.get_running_loop().call_later(interval_s, self.look)

    def look(self) -> None:
        """Look at all now."""
        now_ns = self._now_ns()
        self._time_ns += min(now_ns - self._last_look_ns, int(2 * self._interval_s * 1e9))
        self._last_look_ns = now_ns
        self._timer = None
        for watched in list(self._watched):
            with failure_logged(logger, "the watchdog could not check a model instance"):
                watched.look(self._time_ns)
        if self._watched:
            self._look_within(min(map(_wanted_interval_s, self._watched)))


def _wanted_interval_s(watched: Watched) -> float:
    limit_s = watched.shortest_limit_s
    return max(min(LOOK_INTERVAL_S, limit_s / _LOOKS_PER_TIMEOUT), MIN_INTERVAL_S) if limit_s else LOOK_INTERVAL_S
