"""Callbacks at the end of an event-loop iteration, after all its input was handled.

Requests that are read in one iteration can share a batch, and the messages of one iteration share a send. So a
scheduler that makes batches decides at the end of the iteration, and the messages are sent after the decisions. What is
written to clients comes last: workers have to compute.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class IterationEnd:
    """The callbacks of one event loop. Use it only in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._decisions: list[Callable[[], None]] = []
        self._sends: list[Callable[[], None]] = []
        self._writes: list[Callable[[], None]] = []
        self._scheduled = False
        #: Whether several messages of a worker, which have come together, are being handled now. A write wakes a
        #: client, which takes the caches of the processor or the processor itself: so all their responses are made
        #: before the first one is written. The response to a message that has come alone is written at once.
        self.joins_writes = False

    @staticmethod
    def current() -> IterationEnd:
        """Return the one object of the running loop."""
        loop = asyncio.get_running_loop()
        if _thread.iteration_end is None or _thread.iteration_end.loop is not loop:
            _thread.iteration_end = IterationEnd(loop)
        return _thread.iteration_end

    def add_decision(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, at the end of this iteration; the iteration's messages are sent after it.

        A decision that is added by a decision runs at the end of the next iteration, after the loop has read input.
        """
        self._decisions.append(callback)
        if not self._scheduled:  # repeats `_schedule`, to save a call for each decision
            self._scheduled = True
            self.loop.call_soon(self._end)

    def add_send(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, after all decisions of this iteration, to send the messages of the iteration."""
        self._sends.append(callback)
        if not self._scheduled:  # repeats `_schedule`, as above
            self._scheduled = True
            self.loop.call_soon(self._end)

    def add_write(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, after all sends of this iteration, to write to a client."""
        self._writes.append(callback)
        if not self._scheduled:  # repeats `_schedule`, as above
            self._scheduled = True
            self.loop.call_soon(self._end)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._end)

    def _end(self) -> None:
        try:
            if self._decisions:
                decisions, self._decisions = self._decisions, []
                self._call(decisions)
            if self._sends:
                sends, self._sends = self._sends, []
                self._call(sends)
            if self._writes:
                writes, self._writes = self._writes, []
                self._call(writes)
        finally:  # also after KeyboardInterrupt: the loop may run again
            self._scheduled = False
            if self._decisions or self._sends or self._writes:
                self._schedule()

    def _call(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # the other callbacks still run
                context = {"message": "a callback at the end of an event-loop iteration failed", "exception": error}
                self.loop.call_exception_handler(context)


class _Thread(threading.local):
    iteration_end: IterationEnd | None = None


_thread = _Thread()
