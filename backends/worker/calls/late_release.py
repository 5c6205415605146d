"""Releases results that the model drops while its worker is idle, when no message is sent that could report them."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long what was dropped may wait, so that most is released by what the worker does anyway, in seconds.
DELAY_S = 0.05


class LateRelease:
    """A thread that releases what was dropped, some time later. It is started when there is something to drop."""

    def __init__(self, release: Callable[[], None], delay_s: float = DELAY_S) -> None:
        """`release` is called by the thread; nothing need be left for it."""
        self._release = release
        self._delay_s = delay_s
        # SimpleQueue.put may be called by a finalizer that interrupts another put.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._signalled = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="late release", daemon=True)
                    self._thread.start()

    def signal(self) -> None:
        """Something was dropped. The garbage collector may call this at any point: it uses no lock."""
        if not self._signalled:
            self._signalled = True
            self._signals.put(None)

    def _run(self) -> None:
        try:
            while True:
                self._signals.get()
                time.sleep(self._delay_s)
                self._signalled = False  # first: what is dropped from now on has a signal of its own
                self._release()
        except OSError:  # the kernel is gone
            return
