"""Gives a helper one task after the other: what waits is written together, after a delay, or at once when it is much.

Traces and records of the flight recorder are written so. The owner has what waits, and makes a task of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.helper_tasks import Helpers, HelperTask


class WriteTurns:
    """When the helper gets the next task. Use it only in the kernel's event loop."""

    __slots__ = ("_all_done", "_helpers", "_next_task", "_timer", "closing", "resting", "running")

    def __init__(self, helpers: Helpers, next_task: Callable[[], HelperTask | None]) -> None:
        """`next_task` makes a task of what waits; None if nothing does. The owner calls `ended` when it has ended."""
        self._helpers = helpers
        self._next_task = next_task
        self._timer: asyncio.TimerHandle | None = None
        self._all_done: asyncio.Event | None = None
        #: Whether the helper has a task.
        self.running = False
        #: Whether the helper has no task and none is due: then something that comes calls `soon`.
        self.resting = True
        #: Whether the server waits until all is written.
        self.closing = False

    def soon(self, delay_s: float) -> None:
        """Start a task after `delay_s` seconds, unless one runs or is due."""
        if self.resting:
            self.resting = False
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.now)

    def now(self) -> None:
        """Start a task, unless one runs or nothing waits."""
        if self.running:
            return
        self._cancel_timer()
        task = self._next_task()
        if task is None:
            self.resting = True
            if self._all_done is not None:
                self._all_done.set()
            return
        self.running, self.resting = True, False
        self._helpers.add(task)

    def ended(self, pause_s: float) -> None:
        """The task has ended: start the next one after `pause_s` seconds, at once while the server waits for all."""
        self.running, self.resting = False, True
        if self.closing or not pause_s:
            self.now()
        else:
            self.soon(pause_s)

    async def close(self, timeout_s: float) -> bool:
        """Let the helper write all that waits. Returns whether it has done so within `timeout_s` seconds."""
        self.closing = True
        self._all_done = asyncio.Event()
        self.now()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_done.wait()
        except TimeoutError:
            return False
        finally:
            self._cancel_timer()
        return True

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
