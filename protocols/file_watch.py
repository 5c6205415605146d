"""Looks at files from time to time, because programs that replace them cannot tell a server."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kernel.file_threads import in_file_thread
from kernel.observe.limited_log import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

#: Each look may fail.
_failures = LimitedLog(logging.getLogger(__name__))


class FileWatch:
    """Calls a function that looks at files, in a thread: they may be on a file system that does not respond."""

    def __init__(self, look: Callable[[], None], interval_s: float, failure: str) -> None:
        """`look` is called every `interval_s` seconds; `failure` is what the log says if it raises an exception."""
        self._look = look
        self._interval_s = interval_s
        self._failure = failure
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on, until `stop`."""
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look_later)

    def stop(self) -> None:
        """End the looks. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        asyncio.ensure_future(in_file_thread(self._look)).add_done_callback(self._looked)

    def _looked(self, look: asyncio.Future[None]) -> None:
        if not look.cancelled() and (error := look.exception()) is not None:
            _failures.log(self._failure, "%s", self._failure, exc_info=error)
        if self._timer is not None:  # not stopped
            self.start()
