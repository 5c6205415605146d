"""Work of the lifecycle in the background, such as the end of a version that was replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


class BackgroundTasks:
    """Tasks that run until they end or `close` cancels them. A failed one is not reported: tasks log what they must."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """How many tasks run."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def uncancelled(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`. It continues if the caller is cancelled."""
        await asyncio.shield(self.start(work))

    async def close(self) -> None:
        """Cancel all tasks and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: a cancelled caller no longer waits for it
