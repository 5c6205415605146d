"""Reports changes of the model's custom metrics to the kernel, on its own thread.

A new metric is reported at once. Changed values are reported with the next response, so that a scrape after it shows
them, or `INTERVAL_S` later: those of models that change many, and those that are changed between requests. A killed
worker loses at most the changes of one interval.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from backends.metric_registry import MetricRegistry
from backends.transport import wire
from backends.transport.framing import FrameTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Long enough to cost little, and much shorter than the scrape interval of Prometheus.
INTERVAL_S = 0.1

#: How many changed series are reported with a response: few enough to take no time.
_FEW = 64

#: How many families, series or changes a part of a report has. Each is limited (`kernel.observe.metric_rules`).
_PART_LENGTH = 64


class MetricReporter:
    """Owns the worker's registry. A model without metrics needs no thread and no message."""

    def __init__(
        self,
        send: Callable[[wire.ToKernel], None],
        interval_s: float = INTERVAL_S,
        send_later: Callable[[wire.ToKernel], None] | None = None,
    ) -> None:
        """`send_later` sends a message with the next one; by default `send` does."""
        self._send = send
        self._send_later = send_later or send
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
        """Send all changes now. A connection that is closed is not an error here: `KernelMessageReader` reports it."""
        if not self._started:
            return
        with self._report_lock, contextlib.suppress(OSError):
            for message in self.registry.take():
                self._send_all(message)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
                    self._thread.start()

    def report_with_response(self) -> None:
        """Send the changes with the response that follows, unless there are many of them: these are reported soon."""
        if self._thread is None or not 0 < self.registry.changed_count <= _FEW:  # most models have no metrics
            return
        with self._report_lock, contextlib.suppress(OSError):
            for message in self.registry.take():
                try:
                    self._send_later(message)
                except FrameTooLarge:
                    self._send_all(message)

    def _send_all(self, message: wire.MetricsChanged) -> None:
        """Send a report, in parts if it is longer than a message may be."""
        try:
            self._send(message)
        except FrameTooLarge:
            for part in _parts(message):
                self._send(part)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._signals.get()
            self._stopping.wait(self._interval_s)
            while not self._signals.empty():  # the next report includes their changes
                self._signals.get_nowait()
            self.report()


def _parts(message: wire.MetricsChanged) -> Iterator[wire.MetricsChanged]:
    """Yield parts of a report that have the same effect in this order."""
    for field in wire.MetricsChanged.__struct_fields__:
        entries = getattr(message, field)
        for start in range(0, len(entries), _PART_LENGTH):
            yield wire.MetricsChanged(**{field: entries[start : start + _PART_LENGTH]})
