"""Work in the background, such as polls of the repositories, lookups in a cache, or the end of a replaced version."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from kernel.errors import ServingError
from kernel.observe.limited_log import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

#: Work that fails is begun again, and may fail again, without end.
_failures = LimitedLog(logging.getLogger(__name__))


class FailureCount:
    """How much work in the background has ended by an exception that nobody waited for."""

    def __init__(self) -> None:
        self.value = 0


#: Of this process: metrics and the page show it.
FAILURES = FailureCount()


class BackgroundTasks:
    """Tasks that run until they end or `close` cancels them. An exception that ends one is logged and counted."""

    def __init__(self, failures: FailureCount = FAILURES) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        #: The tasks whose callers get their `ServingError`.
        self._awaited: set[asyncio.Task[None]] = set()
        self.failures = failures

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

    def keep(self, title: str, work: Callable[[], Coroutine[Any, Any, None]], pause_s: float) -> asyncio.Task[None]:
        """Do `work` until it ends without an exception: after each exception again, `pause_s` seconds later.

        `title` names it in the log, such as "the poll of the repositories".
        """
        return self.start(self._again(title, work, pause_s))

    async def uncancelled(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`. It continues if the caller is cancelled. Raises its exception."""
        task = self.start(work)
        self._awaited.add(task)
        await asyncio.shield(task)

    async def wait(self) -> None:
        """Wait until no task runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all tasks and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _again(self, title: str, work: Callable[[], Coroutine[Any, Any, None]], pause_s: float) -> None:
        while True:
            try:
                return await work()
            except Exception as error:
                self._failed(f"{title} has failed and begins again in {pause_s:g} s", error)
            await asyncio.sleep(pause_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        is_awaited = task in self._awaited
        self._awaited.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not (is_awaited and isinstance(error, ServingError)):
            coroutine = task.get_coro()
            self._failed(f"{getattr(coroutine, '__qualname__', 'a task')} has failed in the background", error)

    def _failed(self, text: str, error: BaseException) -> None:
        self.failures.value += 1
        _failures.log(f"the background ({type(error).__name__})", "%s", text, exc_info=error)
