"""When all objects of the server are looked through for garbage.

Python does that by itself whenever there are a quarter more of them: with 100,000 queued requests it takes 0.3 s in one
piece, in which nobody is served, and it happens again and again while the queue grows. Requests leave hardly any
garbage, and young objects are still looked through all the time. So all objects are looked through when the server is
idle and few requests live, or late.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Collections of younger objects after which it is worth to look at all: Python's own number.
LEAST_YOUNGER_COLLECTIONS = 10

#: With more live requests it takes longer than a request may wait.
FEW_REQUESTS = 1000

#: How long it waits at most while few requests live and the server is busy, and while many live.
BUSY_LATEST_NS, LATEST_NS = 60_000_000_000, 600_000_000_000


class FullCollections:
    """Decides when. Pure."""

    def __init__(self) -> None:
        self._last_ns: int | None = None

    def is_due(self, younger_collections: int, live_count: int, now_ns: int, *, idle: bool) -> bool:
        """Whether all objects are to be looked through now.

        There were `younger_collections` since the last time, and `live_count` requests have no final response.
        """
        if self._last_ns is None:
            self._last_ns = now_ns
        if younger_collections < LEAST_YOUNGER_COLLECTIONS:
            return False
        least_ns = 0 if idle else BUSY_LATEST_NS
        if live_count > FEW_REQUESTS:
            least_ns = LATEST_NS
        if now_ns - self._last_ns < least_ns:
            return False
        self._last_ns = now_ns
        return True


class GarbageCollection:
    """The collector of a process that is the server's own."""

    def __init__(self, live_count: Callable[[], int]) -> None:
        """`live_count` returns how many requests have no final response."""
        self._live_count = live_count
        self._decision = FullCollections()
        self._thresholds = gc.get_threshold()

    def begin(self) -> None:
        """Leave the oldest objects to `collect`. `end` follows."""
        gc.set_threshold(*self._thresholds[:2], sys.maxsize >> 33)  # a C int

    def end(self) -> None:
        """Let Python decide again."""
        gc.set_threshold(*self._thresholds)

    def collect(self, *, idle: bool) -> None:
        """Look through all objects if it is time for that. Called about once a second."""
        if self._decision.is_due(gc.get_count()[2], self._live_count(), time.monotonic_ns(), idle=idle):
            gc.collect()
