"""When the server gives back memory that it no longer needs: freed memory of malloc, and garbage of Python.

malloc gives back what is free at the end of its heap by itself, and keeps all that lies before something in use. After
a flood of requests a server would keep hundreds of MiB. To give them back takes about 0.1 ms per MiB, in one piece in
which no other thread can allocate: a request that comes meanwhile waits. So it is done when little is in use again, not
often, and when the server does nothing. Only a server that is busy all the time does it beside its requests, late.

Python looks through all objects for garbage whenever there are a quarter more of them: with 100,000 queued requests it
takes 0.3 s in one piece, in which nobody is served, and it happens again and again while the queue grows. Requests
leave hardly any garbage, and young objects are still looked through all the time. So all objects are looked through
when the server is idle and few requests live, or late.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.blocks import ByteBudget

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


#: Fewer freed bytes are kept for the next requests.
LEAST_BYTE_SIZE = 32 << 20

#: A server that uses less of a processor is idle.
_IDLE_SHARE = 0.1

#: How long memory is kept while the server is busy.
KEPT_LATEST_NS = 60_000_000_000

#: How often the use is looked at, in seconds, and the least time between two times that memory is given back.
_INTERVAL_S = 1.0

LEAST_INTERVAL_NS = 5_000_000_000


class Trimming:
    """Decides from the bytes in use. Pure."""

    def __init__(self) -> None:
        #: The most bytes that were seen in use since memory was given back.
        self._most = 0
        self._not_before_ns = 0
        #: Since when memory could be given back, and is not because the server is busy.
        self._kept_since_ns: int | None = None

    def is_due(self, used_byte_size: int, now_ns: int, *, idle: bool) -> bool:
        """Whether memory is to be given back now."""
        self._most = max(self._most, used_byte_size)
        if used_byte_size > self._most // 4 or self._most - used_byte_size < LEAST_BYTE_SIZE:
            self._kept_since_ns = None
            return False
        if now_ns < self._not_before_ns:
            return False
        if self._kept_since_ns is None:
            self._kept_since_ns = now_ns
        if not idle and now_ns - self._kept_since_ns < KEPT_LATEST_NS:
            return False
        self._most, self._kept_since_ns = used_byte_size, None
        self._not_before_ns = now_ns + LEAST_INTERVAL_NS
        return True


async def give_freed_memory_back(
    budget: ByteBudget, give_back: Callable[[], None], garbage: GarbageCollection | None = None
) -> None:
    """Call `give_back`, in a thread, when the requests that used memory have ended. Runs until it is cancelled.

    Before, `garbage` is collected where it is time for that.
    """
    trimming = Trimming()
    before_ns, busy_before_ns = time.monotonic_ns(), time.process_time_ns()
    while True:
        await asyncio.sleep(_INTERVAL_S)
        now_ns, busy_ns = time.monotonic_ns(), time.process_time_ns()
        idle = busy_ns - busy_before_ns < _IDLE_SHARE * (now_ns - before_ns)
        before_ns, busy_before_ns = now_ns, busy_ns
        if garbage is not None:
            garbage.collect(idle=idle)
        if trimming.is_due(budget.used_byte_size, now_ns, idle=idle):
            await asyncio.to_thread(give_back)
