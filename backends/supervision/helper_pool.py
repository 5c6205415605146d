"""The helpers of a server: processes with low priority that decode and encode large messages.

They also access regions of clients. They are started when they are first needed, and restarted after a loss.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from backends.supervision.helper_process import TASK_TIMEOUT_S, Helper
from backends.supervision.task_queue import TaskQueue
from kernel.errors import RequestCancelled, ServingError
from kernel.machine import processor_count
from kernel.serving.front_doors.server_parts import ServerPart

if TYPE_CHECKING:
    from backends.supervision.launcher import Launcher
    from kernel.serving.helper_tasks import HelperTask
    from shm.budget import ByteBudget
    from shm.tensor import Buffer, Span

logger = logging.getLogger(__name__)


#: How many helpers are started before the first task.
_STARTED_AHEAD = 2


class HelperPool(ServerPart):
    """Runs each task on the helper that is free. Implements `kernel.serving.helper_tasks.FrontDoorHelpers`."""

    def __init__(
        self,
        launcher: Launcher,
        arena_byte_size: int,
        budget: ByteBudget | None = None,
        *,
        count: int,
        title: str = "helper",
        task_timeout_s: float = TASK_TIMEOUT_S,
    ) -> None:
        """There are at most `count` helpers, named `title` and a number. The other arguments are those of `Helper`."""
        self._free = [
            Helper(launcher, arena_byte_size, budget, title=f"{title} {number}", task_timeout_s=task_timeout_s)
            for number in reversed(range(count))
        ]
        self._first = self._free[-1]
        self._all = tuple(self._free)
        self._queue = TaskQueue(count)
        self._runs: set[asyncio.Task[None]] = set()
        #: Starts the first helper before its first task.
        self._ahead: asyncio.Task[None] | None = None
        self._closed = False
        #: Whether there is a processor beside those of a busy kernel and a busy worker. Helpers have low priority.
        self._has_processor = processor_count() > 2

    # ---- kernel.serving.helper_tasks.Helpers ----------------------------------------------------

    def add(self, task: HelperTask) -> None:
        self._queue.add(task)
        self._run_waiting()

    def cancel(self, task: HelperTask) -> None:
        if self._queue.remove(task):
            task.failed(RequestCancelled())

    @property
    def idle(self) -> bool:
        return self._has_processor and len(self._free) == len(self._all) and self._free[-1].started

    @property
    def ready(self) -> bool:
        return self._first.started

    def start_ahead(self) -> None:
        if self._ahead is not None or self._closed:
            return
        self._ahead = asyncio.get_running_loop().create_task(self._start_ahead())
        self._runs.add(self._ahead)
        self._ahead.add_done_callback(self._runs.discard)

    async def _start_ahead(self) -> None:
        """Start two helpers: a task that comes while the first one is busy would wait for the start of the second."""
        for helper in self._all[: -_STARTED_AHEAD - 1 : -1]:
            if not self._closed:
                await helper.start()

    def _run_waiting(self) -> None:
        while self._free and not self._closed and (task := self._queue.take()) is not None:
            run = asyncio.get_running_loop().create_task(self._run(self._free.pop(), task))
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)

    async def _run(self, helper: Helper, task: HelperTask) -> None:
        try:
            result, output = await helper.run(task)
        except ServingError as error:
            task.failed(error)
        else:
            task.done(result, output)
        finally:
            self._free.append(helper)
            self._queue.ended(task)
            self._run_waiting()

    # ---- regions of clients ----------------------------------------------------------------------

    async def read(self, span: Span) -> Span:
        """Return a copy of the bytes of `span`, see `Helper.read`."""
        return await self._for_regions().read(span)

    async def write(self, data: Buffer, target: Span) -> None:
        """Write `data` to the beginning of `target`, see `Helper.write`."""
        await self._for_regions().write(data, target)

    def _for_regions(self) -> Helper:
        """Return a helper that runs no task, which could take seconds, if there is one."""
        return self._free[-1] if self._free else self._first

    async def close(self) -> None:
        """Stop the helpers. Tasks that wait or run fail."""
        self._closed = True
        await asyncio.gather(*(helper.close() for helper in self._all))
        await asyncio.gather(*self._runs)
        while (task := self._queue.take()) is not None:
            self._queue.ended(task)
            task.failed(RequestCancelled())
