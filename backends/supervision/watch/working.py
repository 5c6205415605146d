"""Waits for a process as long as it works, because on a busy or swapping machine a start can take very long."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

#: How often a process is checked, in seconds.
LOOK_S = 1.0


class WorkWatch:
    """Decides when a process makes no progress. Pure.

    At each look it is given a mark, such as `processor_demand.work_mark`: an equal one says that nothing was done.
    """

    def __init__(self, limit_ns: int, now_ns: int) -> None:
        """The process makes no progress when its mark has not changed for `limit_ns`."""
        self._limit_ns = limit_ns
        self._changed_ns = now_ns
        self._mark: Hashable = None

    def stands_still(self, now_ns: int, mark: Hashable) -> bool:
        """Note `mark`, as it is at `now_ns`. Without any, None, the limit is that of the whole time."""
        if mark != self._mark:
            self._mark, self._changed_ns = mark, now_ns
        return now_ns - self._changed_ns >= self._limit_ns


async def done_while_working(
    future: asyncio.Future[Any],
    mark: Callable[[], Hashable],
    limit_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait for `future`, which is not cancelled; returns False if the process did nothing for `limit_s` seconds before.

    `mark` returns the mark of the process that will set the future. A process that is `stopped` by a signal at two
    looks in a row does nothing either.
    """
    watch, was_stopped = WorkWatch(round(limit_s * 1e9), time.monotonic_ns()), False
    while not future.done():
        await asyncio.wait([future], timeout=min(LOOK_S, limit_s))
        if future.done():
            break
        is_stopped = stopped()
        if watch.stands_still(time.monotonic_ns(), mark()) or (is_stopped and was_stopped):
            return False
        was_stopped = is_stopped
    return True
