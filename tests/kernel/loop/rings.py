"""Records the times of calls, for tests of timers and alarms."""

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

    async def next_time_ns(self) -> int:
        """Wait for the next call and return its time, or the last call's if there was one since the last wait."""
        await self._rung.wait()
        self._rung.clear()
        return self.times_ns[-1]
