"""The helpers of a server: processes with low priority that decode and encode large messages.

They also access regions of clients. They are started when they are first needed, and restarted after a loss.
`HelperPool` gives tasks to helpers; `TaskQueue` says which one a free helper runs next. Peers get equal shares, so that
one with many tasks does not delay others.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from typing import TYPE_CHECKING

from backends.helper.process import TASK_PROBLEM, TASK_TIMEOUT_S, Helper
from kernel.background import BackgroundTasks
from kernel.errors import RequestCancelled, ServingError
from kernel.machine import processor_count
from kernel.server_parts import ServerPart

if TYPE_CHECKING:
    from backends.launch.launcher import Launcher
    from kernel.serving.helper_tasks import HelperTask
    from shm.blocks import ByteBudget
    from shm.tensor import Buffer, Span

#: A task with more bytes of sources is large: it takes up to seconds, others milliseconds.
LARGE_BYTE_SIZE = 256 << 10

#: Bytes that count for each task beside its own.
_TASK_BYTE_SIZE = 16 << 10

#: How many peers without waiting tasks are remembered before they are looked through.
_REMEMBERED_PEERS = 256

#: How many entries of removed tasks are kept, beside as many as tasks wait.
_REMOVED_KEPT = 256

#: The start of a task, and its number. The least entry is next: that with the least start, and of those the one that
#: came first.
_Entry = tuple[int, int]


class TaskQueue:
    """Tasks that wait for a helper. One helper is kept free of large tasks, so that small ones never wait for them.

    Each peer gets an equal part of the bytes that are worked on (start-time fair queuing). Time is counted in bytes: a
    task starts when its peer's task before it ends, or now, whichever is later, and the least start is next. Virtual
    time advances more slowly than a single peer's tasks end. So the first task of a peer never waits for waiting tasks
    of another peer, however many these are, and an endless series of new peers cannot keep the others waiting.
    """

    def __init__(self, helper_count: int) -> None:
        self._max_running_large = max(1, helper_count - 1)
        self._running_large = 0
        self._number = 0
        self._now = 0
        #: How many tasks of a peer wait.
        self._waiting: dict[str, int] = {}
        #: When the last task of a peer ends; a peer that is not in it has no task left.
        self._ends: dict[str, int] = {}
        #: The tasks that wait, by number. Entries of others were removed: a client that leaves removes thousands, and
        #: to search each of them would take long.
        self._tasks: dict[int, HelperTask] = {}
        self._numbers: dict[HelperTask, int] = {}
        #: Heaps, of small and of large tasks.
        self._small: list[_Entry] = []
        self._large: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: HelperTask) -> None:
        """Let `task` wait."""
        self._number += 1
        start = max(self._now, self._ends.get(task.peer, 0))
        self._ends[task.peer] = start + _cost(task)
        self._waiting[task.peer] = self._waiting.get(task.peer, 0) + 1
        self._tasks[self._number], self._numbers[task] = task, self._number
        heapq.heappush(self._large if is_large(task) else self._small, (start, self._number))
        if len(self._ends) > _REMEMBERED_PEERS + len(self):
            self._ends = {peer: end for peer, end in self._ends.items() if end > self._now}

    def take(self) -> HelperTask | None:
        """Return the next task that may run on a free helper, which `ended` must be called for; None if none may."""
        small, large = self._first(self._small), None
        if self._running_large < self._max_running_large:
            large = self._first(self._large)
        if large is not None and (small is None or large < small):
            self._running_large += 1
            return self._take_first(self._large)
        return None if small is None else self._take_first(self._small)

    def _first(self, waiting: list[_Entry]) -> _Entry | None:
        """Return the entry of the next task, None if none waits. Entries of removed tasks before it are dropped."""
        tasks = self._tasks
        while waiting and waiting[0][1] not in tasks:
            heapq.heappop(waiting)
        return waiting[0] if waiting else None

    def remove(self, task: HelperTask) -> bool:
        """Return whether `task` waited; then it does not any more."""
        number = self._numbers.pop(task, None)
        if number is None:
            return False
        del self._tasks[number]
        self._left(task.peer)
        if len(self._small) + len(self._large) > 2 * len(self._tasks) + _REMOVED_KEPT:
            for waiting in (self._small, self._large):
                waiting[:] = [entry for entry in waiting if entry[1] in self._tasks]
                heapq.heapify(waiting)
        return True

    def ended(self, task: HelperTask) -> None:
        """A task that `take` returned does not run any more."""
        if is_large(task):
            self._running_large -= 1

    def _take_first(self, waiting: list[_Entry]) -> HelperTask:
        start, number = heapq.heappop(waiting)
        task = self._tasks.pop(number)
        del self._numbers[task]
        self._now = max(self._now, start + _cost(task) // (len(self._waiting) + 1))
        self._left(task.peer)
        return task

    def _left(self, peer: str) -> None:
        """A task of `peer` does not wait any more."""
        self._waiting[peer] -= 1
        if not self._waiting[peer]:
            del self._waiting[peer]


def is_large(task: HelperTask) -> bool:
    return _byte_size(task) > LARGE_BYTE_SIZE


def _cost(task: HelperTask) -> int:
    return _TASK_BYTE_SIZE + _byte_size(task)


def _byte_size(task: HelperTask) -> int:
    return sum(source.byte_size for source in task.sources)


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
        problem: str = TASK_PROBLEM,
    ) -> None:
        """There are at most `count` helpers, named `title` and a number. The other arguments are as for `Helper`."""
        self.free = [
            Helper(
                launcher,
                arena_byte_size,
                budget,
                title=f"{title} {number}",
                task_timeout_s=task_timeout_s,
                problem=problem,
            )
            for number in reversed(range(count))
        ]
        self._first = self.free[-1]
        self._all = tuple(self.free)
        self._queue = TaskQueue(count)
        self._runs = BackgroundTasks()
        #: Whether the first helpers were started before their first task.
        self._starts_ahead = False
        self._closed = False
        #: Whether there is a processor beside the two of a busy kernel and a busy worker. Helpers have low priority.
        self._has_processor = processor_count() > 2

    # ---- kernel.serving.helper_tasks.Helpers ----------------------------------------------------

    def add(self, task: HelperTask) -> None:
        if self._closed:
            task.failed(RequestCancelled())
            return
        self._queue.add(task)
        self._run_waiting()

    def cancel(self, task: HelperTask) -> None:
        if self._queue.remove(task):
            task.failed(RequestCancelled())

    @property
    def idle(self) -> bool:
        return self._has_processor and len(self.free) == len(self._all) and self.free[-1].started

    @property
    def ready(self) -> bool:
        return self._first.started

    def start_ahead(self) -> None:
        if self._starts_ahead or self._closed:
            return
        self._starts_ahead = True
        self._runs.start(self._start_ahead())

    async def _start_ahead(self) -> None:
        """Start two helpers: a task that comes while the first one is busy would wait for the start of the second."""
        for helper in self._all[: -_STARTED_AHEAD - 1 : -1]:
            if not self._closed:
                await helper.start()

    def _run_waiting(self) -> None:
        while self.free and not self._closed and (task := self._queue.take()) is not None:
            self._runs.start(self._run(self.free.pop(), task))

    async def _run(self, helper: Helper, task: HelperTask) -> None:
        try:
            result, output = await helper.run(task)
        except ServingError as error:
            task.failed(error)
        else:
            task.done(result, output)
        finally:
            self.free.append(helper)
            self._queue.ended(task)
            self._run_waiting()

    # ---- regions of clients ----------------------------------------------------------------------

    async def read(self, span: Span) -> Span:
        """Return a copy of the bytes of `span`, see `Helper.read`."""
        return await self.for_regions().read(span)

    async def write(self, data: Buffer, target: Span) -> None:
        """Write `data` to the beginning of `target`, see `Helper.write`."""
        await self.for_regions().write(data, target)

    def for_regions(self) -> Helper:
        """Return a helper that runs no task, which could take seconds, if there is one."""
        return self.free[-1] if self.free else self._first

    async def close(self) -> None:
        """Stop the helpers. Tasks that wait or run fail."""
        self._closed = True
        await asyncio.gather(*(helper.close() for helper in self._all))
        await self._runs.wait()
        while (task := self._queue.take()) is not None:
            self._queue.ended(task)
            task.failed(RequestCancelled())
