"""The asyncio event loop for models with `async def execute`: one per worker, in its own thread.

It runs between batches as well, so that tasks of the model continue.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

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
