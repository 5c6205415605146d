"""Pauses an `async def execute` of a decoupled model that is too far ahead of its clients; the event loop runs on.

`ResponseSender.send` waits in a thread while a client has too many responses to take. In the event loop it does not
wait, because all other coroutines would wait too: the coroutine that runs `execute` pauses at its next `await` instead.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Sequence

    from backends.worker.request import WorkerRequest


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
