"""Threads that use the files of the repositories. A file system that hangs keeps nothing but its own work from its end.

Not the threads of `asyncio.to_thread`: there are few of those, and the end of the process waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

#: How many threads work at a time. More would take the interpreter from the event loop, and be no faster.
WORKING_THREADS = 6

#: Seconds after which a thread that uses one file counts as waiting for it, and lets another thread work.
WAITING_S = 5.0

#: How long a thread waits for its next work, in seconds. A server that loads nothing has none.
IDLE_S = 1.0

#: How many threads can be waiting. With more, further work waits until one of them has ended.
_MAX_WAITING = 64

_local = threading.local()
_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Threads] = weakref.WeakKeyDictionary()


async def in_file_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, which uses files, in a thread; return its result or raise its error.

    If the caller is cancelled, it does not wait; the thread goes on. It never keeps the process from its end.
    """
    return await _of_loop().run(partial(function, *args, **kwargs))


async def in_own_thread(title: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, which may take any time, in a new thread with this title; as `in_file_thread` otherwise."""
    loop = asyncio.get_running_loop()
    job, context = _Job(partial(function, *args, **kwargs)), contextvars.copy_context()

    def work() -> None:
        context.run(job.work)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(job.end)

    threading.Thread(target=work, name=title, daemon=True).start()
    await job.ended
    result: T = job.result()
    return result


def uses(path: str) -> None:
    """Note that this thread is about to use the file or folder at `path`: `oldest_path` returns it if it hangs."""
    job: _Job | None = getattr(_local, "job", None)
    if job is not None:
        job.path, job.since_s = path, time.monotonic()


def oldest_path() -> str:
    """Return the path that has kept a thread of this event loop for the longest time; "" if none has for `WAITING_S`.

    It may be read while the file system hangs, so it takes no lock and uses no file.
    """
    before_s = time.monotonic() - WAITING_S
    waiting = [job for job in _of_loop().jobs if job.path and job.since_s < before_s]
    return min(waiting, key=lambda job: job.since_s).path if waiting else ""


def _of_loop() -> _Threads:
    loop = asyncio.get_running_loop()
    found = _threads.get(loop)
    if found is None:
        found = _threads[loop] = _Threads()
    return found


class _Threads:
    """The threads of one event loop, on whose thread this is used."""

    def __init__(self) -> None:
        self.jobs: set[_Job] = set()
        #: Threads without a job, the one that had one last at the end. Changed under the lock.
        self._idle: list[_FileThread] = []
        self._lock = threading.Lock()
        self._working = self._waiting = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    def _idle_thread(self) -> _FileThread:
        """Return a thread that has no job. Raises RuntimeError if none could be started."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _FileThread(self)

    def retire(self, thread: _FileThread) -> bool:
        """Whether `thread`, which calls this, may end: it gets no more jobs then."""
        with self._lock:
            if thread not in self._idle:
                return False
            self._idle.remove(thread)
            return True

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` in a thread that does nothing else, as soon as there is a place for it."""
        await self._take_place()
        job = _Job(function)
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()  # lines of the log name the model

        def work() -> bool:
            context.run(job.work)
            try:
                loop.call_soon_threadsafe(self._end, job, thread)
            except RuntimeError:  # the event loop has ended
                return False
            return True

        try:
            thread = self._idle_thread()
            thread.take(work)
        except RuntimeError as error:
            self._leave_place()
            raise InternalError(f"no thread could be started to read files: {error}") from error
        self.jobs.add(job)
        job.timer = loop.call_later(WAITING_S, self._look, job)
        await job.ended
        result: T = job.result()
        return result

    async def _take_place(self) -> None:
        if self._working < WORKING_THREADS:
            self._working += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it has got the place
                self._leave_place()
            raise

    def _leave_place(self) -> None:
        """Let the work that has waited for the longest time have the place."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._working -= 1

    def _look(self, job: _Job) -> None:
        """A thread works for a while: it may be waiting for a file system, and others need not wait for it."""
        if self._waiting < _MAX_WAITING:
            job.has_place, job.timer = False, None
            self._waiting += 1
            self._leave_place()
        else:
            job.timer = asyncio.get_running_loop().call_later(WAITING_S, self._look, job)

    def _end(self, job: _Job, thread: _FileThread) -> None:
        with self._lock:
            self._idle.append(thread)
        self.jobs.discard(job)
        if job.timer is not None:
            job.timer.cancel()
        if job.has_place:
            self._leave_place()
        else:
            self._waiting -= 1
        job.end()


class _FileThread:
    """A thread that works off jobs, one after the other. It ends when it has had none for `IDLE_S`.

    A load needs several: to start a thread for each takes longer than most of them.
    """

    def __init__(self, threads: _Threads) -> None:
        """Raises RuntimeError if no thread can be started."""
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._threads = weakref.ref(threads)
        threading.Thread(target=self._run, name="repository files", daemon=True).start()

    def take(self, work: Callable[[], bool]) -> None:
        """Let the thread call `work`. The thread ends if it returns False."""
        self._jobs.put(work)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                work = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                threads = self._threads()
                goes_on = threads is not None and not threads.retire(self)
                continue
            goes_on = work()
            del work  # with its results


class _Job:
    """What one thread does."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._results: list[Any] = []
        self._error: BaseException | None = None
        #: The file or folder that the thread uses, and since when, of the monotonic clock.
        self.path = ""
        self.since_s = time.monotonic()
        #: Whether it counts as one that works.
        self.has_place = True
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None

    def work(self) -> None:
        """In the thread."""
        _local.job = self
        try:
            self._results.append(self._function())
        except BaseException as error:  # raised by the coroutine that waits
            self._error = error
        finally:
            _local.job = None

    def end(self) -> None:
        """On the event loop, after `work`: wake the coroutine that waits, unless it was cancelled."""
        if not self.ended.done():
            self.ended.set_result(None)

    def result(self) -> Any:
        """Return the result, or raise the error."""
        error, self._error = self._error, None
        if error is None:
            return self._results[0]
        try:
            raise error
        finally:
            del error  # its traceback has this frame
