"""The asyncio event loop for models with `async def execute`: one per worker, in its own thread.

It runs between batches as well, so that tasks of the model continue.

Pauses an `async def execute` of a decoupled model that is too far ahead of its clients; the event loop runs on.

`ResponseSender.send` waits in a thread while a client has too many responses to take. In the event loop it does not
wait, because all other coroutines would wait too: the coroutine that runs `execute` pauses at its next `await` instead.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Sequence
    from concurrent.futures import Future

    from backends.worker.request import WorkerRequest

_T = TypeVar("_T")

#: How long `stop` waits for tasks that do not end when they are cancelled, in seconds.
_STOP_TIMEOUT_S = 5.0


class EventLoop:
    """An event loop in a thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncio", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        #: The loop itself has only weak references to its tasks.
        self._tasks: set[asyncio.Task[object]] = set()
        #: Set when the loop is to end.
        self._end: asyncio.Event

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    @property
    def thread_id(self) -> int:
        """The identity of the thread, as `threading.get_ident` returns it there."""
        return self._thread.ident or 0

    def start_task(self, coroutine: Coroutine[object, object, object]) -> None:
        """Run `coroutine`, which must not raise, on the loop."""

        def start() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)

    def submit(self, coroutine: Coroutine[object, object, _T]) -> Future[_T]:
        """Run `coroutine` on the loop. Only other threads may wait for the result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel all tasks and end the loop."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.run(self._until_stop())  # ends what is left; `asyncio.Runner` is not there on Python 3.9 and 3.10

    async def _until_stop(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._end.wait()


class Paced:
    """Awaits a coroutine. It is not resumed while one of the requests is too far ahead of its client."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], requests: Sequence[WorkerRequest]) -> None:
        self._coroutine = coroutine
        self._requests = requests

    def __await__(self) -> Generator[Any, Any, object]:
        """Return what the coroutine returns, or raise what it raises."""
        coroutine, resume, argument = self._coroutine, self._coroutine.send, None
        while True:
            try:
                awaited = resume(argument)
            except StopIteration as end:
                return end.value
            try:
                argument = yield awaited
                for request in self._requests:
                    if request.is_ahead():
                        yield from self._wait(request)
                resume = coroutine.send
            except BaseException as error:  # the task is cancelled
                resume, argument = coroutine.throw, error

    def _wait(self, request: WorkerRequest) -> Generator[Any, Any, None]:
        """Wait until the client has read responses, or has disconnected."""
        loop = asyncio.get_running_loop()
        taken = loop.create_future()

        def on_taken() -> None:
            if not taken.done():
                taken.set_result(None)

        request.when_taken(lambda: loop.call_soon_threadsafe(on_taken))
        yield from taken
