"""Threads of repository agents. An action that never ends keeps nothing else from its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_own_thread(action: Callable[[], T]) -> T:
    """Call `action` in a thread of its own; return its result or raise its error. If cancelled, the thread goes on.

    Not in a thread of `asyncio.to_thread`: there are few of those, and the ends of the event loop and of the process
    wait for them.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(end)

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    context = contextvars.copy_context()  # lines of the log name the model
    threading.Thread(target=context.run, args=(run,), name="repository agent", daemon=True).start()
    await ended
    if errors:
        raise errors[0]
    return results[0]
