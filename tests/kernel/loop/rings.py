"""When something rang, for tests of timers and alarms."""

from __future__ import annotations

import asyncio
import time


class Rings:
    """The times of all calls of `ring`, in monotonic nanoseconds."""

    def __init__(self) -> None:
        self.times_ns: list[int] = []
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self.times_ns.append(time.monotonic_ns())
        self._rung.set()

    async def one_more(self) -> int:
        """Return the time of the next call."""
        await self._rung.wait()
        self._rung.clear()
        return self.times_ns[-1]
