"""What is done once in a turn of the event loop, when all that had come has been looked at.

Requests that are read in the same turn can share a batch, and the messages of a turn share a send. So a scheduler
that makes batches decides at the end of the turn, and what was sent in it leaves behind that, in the same turn.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class IterationEnd:
    """The ends of the turns of one event loop. Of the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._decisions: list[Callable[[], None]] = []
        self._departures: list[Callable[[], None]] = []
        self._expected = False

    @staticmethod
    def here() -> IterationEnd:
        """Return that of the running loop: the same for all who ask while it runs."""
        loop = asyncio.get_running_loop()
        if _thread.turn_end is None or _thread.turn_end.loop is not loop:
            _thread.turn_end = IterationEnd(loop)
        return _thread.turn_end

    def decide(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the end of this turn; what it sends leaves with the rest.

        What a decision asks to decide comes at the end of the next turn: the loop looks for input in between.
        """
        self._decisions.append(callback)
        self._expect()

    def leave(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which sends what was said in this turn, after all decisions of the turn."""
        self._departures.append(callback)
        if not self._expected:  # as `_expect`, of which every send would be a call
            self._expected = True
            self.loop.call_soon(self._end)

    def _expect(self) -> None:
        if not self._expected:
            self._expected = True
            self.loop.call_soon(self._end)

    def _end(self) -> None:
        try:
            decisions, self._decisions = self._decisions, []
            self._call(decisions)
            departures, self._departures = self._departures, []
            self._call(departures)
        finally:  # also where the program is being ended: there are turns to come
            self._expected = False
            if self._decisions or self._departures:
                self._expect()

    def _call(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # one that fails does not take the others along
                context = {"message": "a callback at the end of a turn failed", "exception": error}
                self.loop.call_exception_handler(context)


class _Thread(threading.local):
    turn_end: IterationEnd | None = None


_thread = _Thread()
