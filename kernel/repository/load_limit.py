"""Limits how many loads use a processor at the same time (`--model-load-thread-count`).

A model whose `initialize` waits (for a download, a lock, another server) uses no processor and does not count,
and another load may begin meanwhile: otherwise four models that wait would block all others. Triton's threads, which
this setting is named after, wait with their model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from kernel.loop.clock import Clock

#: How often the work of loads is checked while others wait for their turn. A load that waits for less is not noticed.
LOOK_S = 0.05

#: A load that needed a smaller part of a processor since it was last looked at waits.
WORKING_PART = 0.1


class Worked(Protocol):
    """What a load has of workers."""

    def demanded_ns(self) -> int | None:
        """Return how long the worker has used a processor or waited for one; None if that is not known."""


class LoadSlots:
    """Which loads work and which only wait. Pure: the caller gives the time, and the processor time of each load."""

    def __init__(self, limit: int) -> None:
        """`limit` is how many loads may work at the same time, at least 1."""
        self._limit = limit
        #: Number of a load → when it was looked at, and what it had demanded then.
        self._seen: dict[int, tuple[int, int] | None] = {}
        self._waiting: set[int] = set()
        self._last = 0

    @property
    def free(self) -> bool:
        """Whether another load may begin. Loads that waited and work again may be more than the limit."""
        return len(self._seen) - len(self._waiting) < self._limit

    def begin(self) -> int:
        """Count a load that begins, as one that works; returns its number."""
        self._last += 1
        self._seen[self._last] = None
        return self._last

    def end(self, number: int) -> None:
        """Count a load no longer."""
        del self._seen[number]
        self._waiting.discard(number)

    def look(self, now_ns: int, demanded: Mapping[int, int | None]) -> None:
        """Decide by what each load has demanded until now, in nanoseconds. One that is not known works."""
        for number, demanded_ns in demanded.items():
            if number not in self._seen:
                continue
            before, self._seen[number] = self._seen[number], None
            self._waiting.discard(number)
            if demanded_ns is None:
                continue
            self._seen[number] = (now_ns, demanded_ns)
            # A worker that was replaced has demanded less than the one before it.
            if before is not None and 0 <= demanded_ns - before[1] < (now_ns - before[0]) * WORKING_PART:
                self._waiting.add(number)


class LoadSlot:
    """The turn of one load."""

    def __init__(self) -> None:
        #: The workers of the load. `VersionLoader` sets and extends it.
        self.workers: Sequence[Worked] = ()

    def demanded_ns(self) -> int | None:
        """Return what all workers of the load have demanded; None if that is not known of each."""
        total = 0
        for worker in self.workers:
            demanded_ns = worker.demanded_ns()
            if demanded_ns is None:
                return None
            total += demanded_ns
        return total if self.workers else None


class LoadLimit:
    """Lets loads begin in the order in which they ask. Nothing is checked while no load has to wait for its turn."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._slots = LoadSlots(limit)
        self._clock = clock
        self._running: dict[int, LoadSlot] = {}
        #: Loads that wait for their turn, which is their number.
        self._queue: deque[asyncio.Future[int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[LoadSlot]:
        """Wait for a turn; it ends with the `async with` block."""
        number, slot = await self._turn(), LoadSlot()
        self._running[number] = slot
        try:
            yield slot
        finally:
            del self._running[number]
            self._end(number)

    async def _turn(self) -> int:
        if self._slots.free and not self._queue:
            return self._slots.begin()
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._look_later()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had got its turn meanwhile
                self._end(turn.result())
            raise

    def _end(self, number: int) -> None:
        self._slots.end(number)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._slots.free:
            turn = self._queue.popleft()
            if not turn.cancelled():
                turn.set_result(self._slots.begin())

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._queue:
            return
        self._slots.look(self._clock.now_ns(), {number: slot.demanded_ns() for number, slot in self._running.items()})
        self._admit()
        self._look_later()
