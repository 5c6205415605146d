"""The helper: a worker without a model that reads and writes regions of clients for the kernel.

The kernel never accesses client memory. Workers of this machine access it themselves; the helper does it for workers
that share no memory with the kernel. It is started when it is first needed, and restarted after a loss.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from backends.supervision.session import WorkerSession
from backends.supervision.worker_memory import WorkerMemory
from backends.transport import wire
from kernel.errors import ArenaFull, InvalidArgument, ServingError, Unavailable
from shm.arena import Arena
from shm.tensor import Span

if TYPE_CHECKING:
    from backends.supervision.launcher import Launcher
    from shm.budget import ByteBudget
    from shm.tensor import Buffer

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0


class Helper:
    """Reads and writes spans of client regions, one task at a time."""

    def __init__(self, launcher: Launcher, arena_byte_size: int, budget: ByteBudget | None = None) -> None:
        """`arena_byte_size` limits the bytes that are read, and those that are written, at a time.

        They count in `budget`.
        """
        self._launcher = launcher
        self._arena_byte_size = arena_byte_size
        self._budget = budget
        self._starting = asyncio.Lock()
        self._session: WorkerSession | None = None
        self._memory: WorkerMemory | None = None
        #: Arena with the bytes that the helper shall write.
        self._write_arena: Arena | None = None
        self._tasks: dict[int, asyncio.Future[Span | None]] = {}
        self._numbers = itertools.count(1)

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

    async def close(self) -> None:
        """Stop the helper. No task may be left."""
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
            if self._session is None:
                session = WorkerSession("helper")
                await session.start(self._launcher, helper=True)
                session.on_message = self._on_message
                session.on_lost = self._lost_unexpectedly
                self._session, self._memory = session, WorkerMemory(session, "helper", self._budget)
        assert self._session is not None
        assert self._memory is not None
        return self._session, self._memory

    async def _run_task(self, session: WorkerSession, message: wire.ReadSpan | wire.WriteSpan) -> Span | None:
        future: asyncio.Future[Span | None] = asyncio.get_running_loop().create_future()
        self._tasks[message.task] = future
        session.send(message)
        try:
            return await future
        finally:
            del self._tasks[message.task]

    def _on_message(self, message: wire.ToKernel) -> None:
        assert self._memory is not None
        match message:
            case wire.SpanRead(task=task, tensor=tensor, error_text=text):
                self._task_done(task, None if tensor is None else tensor.span, text)
            case wire.SpanWritten(task=task, error_text=text):
                self._task_done(task, None, text)
            case wire.ArenaCreated(byte_size=byte_size):
                self._memory.take_output_arena(byte_size)
            case _:
                raise ValueError(f"unexpected message {type(message).__name__}")

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
        logger.error("the helper process was lost: %s", cause)
        self._session = None
        self._lost(cause)

    def _lost(self, cause: str) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        for future in self._tasks.values():
            if not future.done():
                error: ServingError = Unavailable(f"the helper process was lost ({cause})")
                future.set_exception(error)
