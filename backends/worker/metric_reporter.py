"""Reports changes of the model's custom metrics to the kernel, on its own thread.

A new metric is reported at once. Changed values are reported at most once per `INTERVAL_S`, and when the worker stops.
So the metrics page is at most that interval behind, and a killed worker loses at most the changes of one interval.
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

#: Long enough to cost little, and much shorter than the scrape interval of Prometheus.
INTERVAL_S = 0.1


class MetricReporter:
    """Owns the worker's registry. A model without metrics needs no thread and no message."""

    def __init__(self, send: Callable[[wire.ToKernel], None], interval_s: float = INTERVAL_S) -> None:
        self._send = send
        self._interval_s = interval_s
        # SimpleQueue.put is reentrant: a finalizer may call it during another put.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.registry = MetricRegistry(self.report, lambda: self._signals.put(None))
        #: Held while changes are taken and sent: the kernel must get a series before its changes.
        self._report_lock = threading.Lock()
        self._started = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """The kernel accepts reports from now on. Report all existing metrics."""
        self._started = True
        self.report()

    def stop(self) -> None:
        """Stop the thread and report the last changes."""
        if self._thread is not None:
            self._stopping.set()
            self._signals.put(None)
            self._thread.join()
        self.report()

    def report(self) -> None:
        """Send all changes now. A connection that is closed is no error here: `KernelMessageReader` reports it."""
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
            while not self._signals.empty():  # the next report includes their changes
                self._signals.get_nowait()
            self.report()
