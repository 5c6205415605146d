"""When the requests of an open loop are due. Pure.

They are due whether or not the server keeps up: a request that must wait for a slow one before it counts this waiting.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CONSTANT, POISSON = "constant", "poisson"


class Arrivals:
    """The due times of one process, in nanoseconds from the beginning, one after the other."""

    def __init__(
        self, rate: float, *, phase: float = 0.0, distribution: str = CONSTANT, uniform: Callable[[], float]
    ) -> None:
        """`rate` requests per second.

        `phase` between 0 and 1 is the part of an interval before the first one, so that several processes take turns.
        `uniform` returns random numbers from 0 up to 1; only `POISSON` asks it.
        """
        self._interval_ns = 1e9 / rate
        self._uniform = uniform
        self._poisson = distribution == POISSON
        self._number = 0
        self._due = phase * self._interval_ns
        if self._poisson:
            self._due = self._gap()

    @property
    def due_ns(self) -> int:
        """When the next request is due."""
        return int(self._due)

    def next(self) -> None:
        """Go on to the request after this one."""
        if self._poisson:
            self._due += self._gap()
        else:
            self._due += self._interval_ns

    def _gap(self) -> float:
        return -math.log(1.0 - self._uniform()) * self._interval_ns
