"""A helper: a worker without a model. It runs tasks of front doors, and accesses regions of clients for the kernel.

The kernel never accesses client memory. Workers of this machine access it themselves; the helper does it for workers
that share no memory with the kernel. It is started when it is first needed, and restarted after a loss.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
from typing import TYPE_CHECKING, TypeVar

from backends.supervision.session import WorkerSession
from backends.supervision.worker_memory import WorkerMemory
from backends.transport import wire
from kernel.errors import ArenaFull, ErrorCode, InvalidArgument, NoMemory, ServingError, Unavailable, error_of
from shm.arena import Arena
from shm.tensor import Span

if TYPE_CHECKING:
    from backends.launch.launcher import Launcher
    from kernel.serving.helper_tasks import HelperTask
    from shm.blocks import ByteBudget
    from shm.region import Region
    from shm.tensor import Buffer, Tensor

logger = logging.getLogger(__name__)

#: Seconds that a task of a front door may take. The largest legal message takes about ten on a processor of its own.
TASK_TIMEOUT_S = 120.0

#: What has happened if a task of a front door takes longer, as the beginning of a sentence.
TASK_PROBLEM = "a message was not decoded or encoded"

#: How often a task that runs is looked at, in seconds. A process that is stopped at two looks in a row is killed.
LOOK_S = 1.0

_STOP_GRACE_S = 1.0

_T = TypeVar("_T")


class Helper:
    """Runs one task of a front door at a time, and reads and writes spans of client regions."""

    def __init__(
        self,
        launcher: Launcher,
        arena_byte_size: int,
        budget: ByteBudget | None = None,
        *,
        title: str = "helper",
        task_timeout_s: float = TASK_TIMEOUT_S,
        problem: str = TASK_PROBLEM,
    ) -> None:
        """`arena_byte_size` limits the bytes that are read, and those that are written, at a time.

        They count in `budget`. The helper is killed if a task of a front door takes longer than `task_timeout_s`;
        the error says `problem`.
        """
        self._title = title
        self._task_timeout_s = task_timeout_s
        self._problem = problem
        self._launcher = launcher
        self._arena_byte_size = arena_byte_size
        self._budget = budget
        self._starting = asyncio.Lock()
        self._closed = False
        self._session: WorkerSession | None = None
        self._memory: WorkerMemory | None = None
        #: Arena with the bytes that the helper shall write.
        self._write_arena: Arena | None = None
        self._tasks: dict[int, asyncio.Future[Span | None]] = {}
        self._numbers = itertools.count(1)
        #: The task of a front door that runs, its number, and its result.
        self._task: HelperTask | None = None
        self._task_number = 0
        self._task_result: asyncio.Future[tuple[bytes, Tensor | None]] | None = None

    @property
    def started(self) -> bool:
        """Whether the process runs."""
        return self._session is not None

    async def start(self) -> None:
        """Start the process if it does not run. A failure is logged: the next task tries again."""
        try:
            await self._ready()
        except ServingError as error:
            logger.warning("%s did not start ahead of its first task: %s", self._title, error.message)

    async def run(self, task: HelperTask) -> tuple[bytes, Tensor | None]:
        """Run a task of a front door: return its result and output, whose lease is the caller's.

        Raises `ServingError`. No other such task may run.
        """
        session, memory = await self._ready()
        for source in task.sources:
            if source.span is not None:
                memory.attach(source.span.lease.region, writable=_is_writable(source.span.lease.region))
        self._task, self._task_number = task, next(self._numbers)
        self._task_result = asyncio.get_running_loop().create_future()
        session.send(wire.RunTask(self._task_number, task.name, task.arguments, task.sources))
        try:
            return await self._in_time(session, self._task_result, self._problem)
        finally:
            self._task = self._task_result = None

    async def read(self, span: Span) -> Span:
        """Return a copy of the bytes of `span`, in an arena. The caller releases its lease. Raises `ServingError`."""
        session, memory = await self._ready()
        memory.attach(span.lease.region, writable=True)
        copy = await self._run_task(session, wire.ReadSpan(next(self._numbers), span))
        assert copy is not None, "a read without bytes"
        return copy

    async def write(self, data: Buffer, target: Span) -> None:
        """Write `data` to the beginning of `target`. Raises `ServingError`."""
        if not data:
            return
        session, memory = await self._ready()
        if self._write_arena is None:
            self._write_arena = Arena("naiad helper", self._arena_byte_size, self._budget)
        block = self._write_arena.take(len(data))
        if block is None:
            raise ArenaFull(len(data))
        try:
            block.view()[:] = data
            for region in (block.lease.region, target.lease.region):
                memory.attach(region, writable=True)
            place = Span(target.lease, target.offset, len(data))
            await self._run_task(session, wire.WriteSpan(next(self._numbers), block.span, place))
        finally:
            block.release()

    async def _kill(self, session: WorkerSession, result: asyncio.Future[_T], why: str) -> None:
        """Kill the process because of its task, if it is still the same; the next task starts another one."""
        logger.error("%s %s and is killed", self._title, why)
        result.cancel()  # nobody waits for it
        if self._session is session:
            self._session = None
            self._lost(why)
        await session.stop(0)

    async def close(self) -> None:
        """Stop the helper. What it does fails, and it is not started any more."""
        async with self._starting:
            self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.stop(_STOP_GRACE_S)
            self._lost("it was stopped")
        if self._write_arena is not None:
            self._write_arena.close()

    # ---- the process -------------------------------------------------------------------------

    async def _ready(self) -> tuple[WorkerSession, WorkerMemory]:
        """Return the running helper; start it if it does not run. Raises `ServingError`."""
        async with self._starting:
            if self._closed:
                raise Unavailable("the helper process was stopped")
            if self._session is None:
                session = WorkerSession(self._title)
                await session.start(self._launcher, helper=True)
                session.on_lost = self._lost_unexpectedly
                self._session, self._memory = session, WorkerMemory(session, self._title, self._budget)
                session.take_messages(self._handlers(self._memory))
        assert self._session is not None
        assert self._memory is not None
        return self._session, self._memory

    async def _run_task(self, session: WorkerSession, message: wire.ReadSpan | wire.WriteSpan) -> Span | None:
        future: asyncio.Future[Span | None] = asyncio.get_running_loop().create_future()
        self._tasks[message.task] = future
        session.send(message)
        try:
            return await self._in_time(session, future, "a region was not read or written")
        finally:
            del self._tasks[message.task]

    async def _in_time(self, session: WorkerSession, result: asyncio.Future[_T], problem: str) -> _T:
        """Return the result of a task. Raises its error, and `Unavailable` with the `problem` if it takes too long.

        The process is killed then, or if a signal has stopped it: other large messages wait for it too.
        """
        clock = asyncio.get_running_loop().time
        end_s, was_stopped = clock() + self._task_timeout_s, False
        while not result.done():
            await asyncio.wait([result], timeout=min(LOOK_S, max(0, end_s - clock())))
            if result.done():
                break
            if clock() >= end_s:
                await self._kill(session, result, f"took more than {self._task_timeout_s:.0f} s for a task")
                raise Unavailable(f"{problem} within {self._task_timeout_s:.0f} s")
            is_stopped = session.stopped
            if is_stopped and was_stopped:
                await self._kill(session, result, "was stopped by a signal (SIGSTOP) in a task")
                raise Unavailable(f"{problem}: the helper process was stopped by a signal")
            was_stopped = is_stopped
        return result.result()

    def _handlers(self, memory: WorkerMemory) -> wire.Handlers:
        return {
            wire.SpanRead: self._span_read,
            wire.SpanWritten: lambda message: self._task_done(message.task, None, message.error_text),
            wire.TaskNeedsMemory: lambda message: self._give_memory(message.task, message.message),
            wire.TaskDone: lambda message: self._end_task(message.task, self._leased(message.output), message.result),
            wire.TaskFailed: self._fail_task,
            wire.ArenaCreated: lambda message: memory.take_output_arena(message.byte_size),
        }

    def _span_read(self, message: wire.SpanRead) -> None:
        self._task_done(message.task, None if message.tensor is None else message.tensor.span, message.error_text)

    def _give_memory(self, number: int, text: bytes) -> None:
        """Let the task that runs choose memory for its result, or fail."""
        assert self._memory is not None
        assert self._session is not None
        if self._task is None or self._task_result is None or number != self._task_number:
            raise ValueError(f"task {number} needs memory, and does not run")
        span: Span | None = None
        try:
            span = self._task.needs_memory(text)
            self._memory.attach(span.lease.region, writable=True)
        except ServingError as error:
            self._task_result.set_exception(error)
        self._session.send(wire.TaskMemory(number, span))

    def _leased(self, output: Tensor | None) -> Tensor | None:
        assert self._memory is not None
        if output is not None and output.span is not None:
            output.span = self._memory.own_span(output.span)
        return output

    def _end_task(self, number: int, output: Tensor | None, result: bytes) -> None:
        if self._task_result is None or self._task_result.done() or number != self._task_number:
            raise ValueError(f"task {number} has a result, and does not run")
        self._task_result.set_result((result, output))

    def _fail_task(self, failed: wire.TaskFailed) -> None:
        if self._task_result is None or self._task_result.done() or failed.task != self._task_number:
            raise ValueError(f"task {failed.task} has failed, and does not run")
        text = failed.error_text
        error = NoMemory(text) if failed.no_memory else error_of(ErrorCode(failed.error_code), text)
        error.before_queueing = failed.error_before_queueing
        self._task_result.set_exception(error)

    def _task_done(self, task: int, span: Span | None, error_text: str) -> None:
        assert self._memory is not None
        leased = None if span is None else self._memory.own_span(span)
        future = self._tasks.get(task)
        if future is None or future.done():  # the caller was cancelled
            if leased is not None:
                leased.lease.release()
        elif error_text:
            future.set_exception(InvalidArgument(error_text))
        else:
            future.set_result(leased)

    def _lost_unexpectedly(self, cause: str) -> None:
        logger.error("%s was lost: %s", self._title, cause)
        self._session = None
        self._lost(cause)

    def _lost(self, cause: str) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        for future in (*self._tasks.values(), self._task_result):
            if future is not None and not future.done():
                future.set_exception(Unavailable(f"the helper process was lost ({cause})"))


def _is_writable(region: Region) -> bool:
    """Whether this process may write to the region, and so let the helper do so: it is an arena of this process.

    A region is attached once, and the memory for the result of a task may be in the region of its source.
    """
    return fcntl.fcntl(region.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
