"""Executes several batches at the same time, for a backend whose instance has a concurrency above 1.

The worker's main thread reads messages and begins batches; the backend says from any thread that one has ended. The
kernel gets a message for each batch that is begun, so it knows what a lost worker was executing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from backends.base import Timings
from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from backends.worker.request import fail_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Backend
    from backends.worker.inputs import InputReader
    from backends.worker.request import WorkerRequest
    from backends.worker.responder import BatchResponder
    from kernel.errors import ServingError

    Send = Callable[[wire.ToKernel], None]


class OverlappingBatches:
    """The batches that an instance executes, and those that wait because it executes enough."""

    def __init__(
        self,
        backend: Backend,
        inputs: InputReader,
        responder: BatchResponder,
        send: Send,
        count_copies: Callable[[wire.Executed], None],
        *,
        collects: bool,
    ) -> None:
        """With `collects`, final responses are sent with the end of their batch; else at once."""
        self.backend = backend
        self.responder = responder
        self.send = send
        self.count_copies = count_copies
        self._inputs = inputs
        self._collects = collects
        #: Guards the two below.
        self._lock = threading.Lock()
        self._running = 0
        #: The schedulers here give an instance no more batches than its concurrency; schedulers of packages may.
        self._waiting: deque[wire.Execute] = deque()
        #: One thread at a time reads inputs.
        self._reading = threading.Lock()

    def add(self, message: wire.Execute, send: Send) -> None:
        """Begin with a batch and say so with `send`, or let it wait until another batch has ended."""
        with self._lock:
            if self._running >= self.backend.concurrency:
                self._waiting.append(message)
                return
            self._running += 1
        self._begin(message, send)

    def _begin(self, message: wire.Execute, send: Send) -> None:
        """Begin with a batch. It may have ended when this returns."""
        start_ns = time.monotonic_ns()
        timings = Timings(start_ns, start_ns, start_ns)
        # Before the inputs are read: that can end the process, if a client has shortened its region.
        send(wire.Started(message.batch))
        with self._reading:
            opened = self.responder.open_overlapping(message.requests, collects=self._collects)
            requests = self._inputs.read(opened)
        del opened  # it refers to inputs, as what `begin` was given
        batch = _Batch(self, message, requests, timings)
        if requests:
            with batch.beginning:
                self.backend.begin(list(requests), timings, batch.ended)
        else:
            batch.ended(None)

    def one_ended(self) -> None:
        """Begin with a batch that waits, if there is one."""
        with self._lock:
            if not self._waiting:
                self._running -= 1
                return
            message = self._waiting.popleft()
        self._begin(message, self.send)


class _Batch:
    """One batch that was begun."""

    def __init__(
        self, batches: OverlappingBatches, message: wire.Execute, requests: list[WorkerRequest], timings: Timings
    ) -> None:
        self._batches = batches
        self._message = message
        self._requests = requests
        self._timings = timings
        #: Held by the thread that begins with the batch, as long as it refers to the inputs.
        self.beginning = threading.RLock()

    def ended(self, failure: ServingError | None) -> None:
        """Report the end of the batch. See `Backend.begin`."""
        if failure is not None or not self._batches.backend.responds_later:
            fail_unfinished(self._requests, failure)
        # They refer to the inputs: any reference that is left is the model's.
        self._requests.clear()
        with self.beginning:  # another thread has at most to return from `Backend.begin`
            pass
        batches, timings, refs = self._batches, self._timings, self._message.requests
        finals = batches.responder.close_overlapping([ref.number for ref in refs])
        reports = batches.responder.reports
        if timings.inferred_ns == timings.inputs_ready_ns:  # the backend has marked no end of the inference
            timings.inferred_ns = time.monotonic_ns()
        if reports.pending or timings.executions is not None:
            reports.flush(self._message.batch, timings.executions or ())
        times = timings.start_ns, timings.inputs_ready_ns, timings.inferred_ns, time.monotonic_ns()
        executed = wire.Executed(self._message.batch, finals, *times)
        batches.count_copies(executed)
        try:
            batches.send(executed)
        except FrameTooLarge:
            batches.responder.send_finals(refs, finals)
            executed.responses = []
            batches.send(executed)
        batches.one_ended()
