"""Tells the kernel what became of the model's own metrics, in portions, on a thread of its own.

A new metric is on the page at once. Values are sent when they have changed, at most once in `INTERVAL_S`, and once
more when the worker stops: a page is as old as that interval, and a worker that is killed takes so much with it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from backends.metric_registry import MetricRegistry

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.transport import wire

#: Rare enough to cost nothing, and far below the interval of any Prometheus.
INTERVAL_S = 0.1


class MetricReporter:
    """Owns the worker's registry. A model without metrics costs no thread and no message."""

    def __init__(self, send: Callable[[wire.ToKernel], None], interval_s: float = INTERVAL_S) -> None:
        self._send = send
        self._interval_s = interval_s
        # SimpleQueue.put may be called by a finalizer that interrupts another put.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.registry = MetricRegistry(self.report, lambda: self._signals.put(None))
        #: Taking and sending are one step: the kernel must know a series before it hears of its changes.
        self._report_lock = threading.Lock()
        self._started = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """The kernel takes reports from now on; it gets all that there is already."""
        self._started = True
        self.report()

    def stop(self) -> None:
        """End, and send what is left."""
        if self._thread is not None:
            self._stopping.set()
            self._signals.put(None)
            self._thread.join()
        self.report()

    def report(self) -> None:
        """Send what has changed now. Where the kernel is gone, that is noticed elsewhere."""
        if not self._started:
            return
        with self._report_lock, contextlib.suppress(OSError):
            for message in self.registry.take():
                self._send(message)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._signals.get()
            self._stopping.wait(self._interval_s)
            while not self._signals.empty():  # what they announced goes along
                self._signals.get_nowait()
            self.report()
