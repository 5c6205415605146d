"""Executes batches one after another, and works on the next and on the last one while a batch is computed.

A thread computes; the worker's main thread reads messages, gathers the inputs of the next batch, and responds to the
last one. So the model never waits for a batch that the worker has got. To wake another thread takes some microseconds:
only slow models with waiting requests are executed this way. All others, and a slow model with one client, are executed
in the main thread.

Batches on a GPU are executed in the same way, but enqueued in the main thread, and the thread waits for the device
(`backends/worker/devices/device_batches.py`).
"""

from __future__ import annotations

import abc
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from backends.base import Timings
from backends.transport import wire
from backends.transport.outbox import IN_MODEL
from backends.worker.message_reader import KernelGone
from backends.worker.reports import send_inputs
from backends.worker.request import fail_unfinished, failure_of
from kernel.observe.limited_log import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Backend, PreparedBatch
    from backends.transport.channel import BlockingChannel
    from backends.worker.held_inputs import HeldInputs
    from backends.worker.inputs import InputReader
    from backends.worker.message_reader import KernelMessageReader
    from backends.worker.request import WorkerRequest
    from backends.worker.responder import BatchResponder
    from kernel.errors import ServingError

logger = logging.getLogger(__name__)

#: Executions that take less time than this are not worth a switch of threads, in nanoseconds.
SLOW_NS = 200_000

#: How long a thread that has the interpreter's lock may keep it while another one wants it, in seconds. The default of
#: 5 ms would let the computing thread wait for the end of a large gather.
SWITCH_INTERVAL_S = 50e-6

#: A batch that is computed, and one that is ready to be.
_MOST_GIVEN = 2


class BatchInThread:
    """A batch from its message to its responses. A thread does a part of it."""

    def __init__(self, message: wire.Execute, requests: list[WorkerRequest], timings: Timings) -> None:
        self.message = message
        self.requests = requests
        self.timings = timings


_Batch = TypeVar("_Batch", bound=BatchInThread)


class WorkerParts(msgspec.Struct, frozen=True):
    """The parts of a worker that execute its batches together with a thread."""

    channel: BlockingChannel
    reader: KernelMessageReader
    inputs: InputReader
    responder: BatchResponder
    held: HeldInputs
    send: Callable[[wire.ToKernel], None]
    #: Executes a batch in the main thread, with its responses, and raises nothing but `KernelGone`. On a device it only
    #: enqueues.
    execute: Callable[[list[WorkerRequest], Timings], None]
    #: Reports a batch that has its responses.
    ended: Callable[[wire.Execute, Timings, list[wire.ResponseMessage]], None]


class ThreadedBatches(abc.ABC, Generic[_Batch]):
    """The batches of one worker while a thread does the part of each that takes long. The main thread calls all methods
    but `_do`."""

    #: The name of the thread.
    _thread_name: str

    def __init__(self, parts: WorkerParts) -> None:
        self._channel = parts.channel
        self._reader = parts.reader
        self._inputs = parts.inputs
        self._responder = parts.responder
        self._held = parts.held
        self._send = parts.send
        self._execute = parts.execute
        self._ended = parts.ended
        #: Whether the next batch is for `serve`: it came while a batch was executed.
        self.wanted = False
        #: None before the first batch.
        self._thread: threading.Thread | None = None
        #: In the order in which they were given to the thread. It has done the first `_done_count`.
        self._in_flight: deque[_Batch] = deque()
        self._done_count = 0
        #: For the thread; None ends it.
        self._given: SimpleQueue[_Batch | None] = SimpleQueue()

    @abc.abstractmethod
    def _take(self, message: wire.Execute) -> None:
        """Begin with a batch."""

    @abc.abstractmethod
    def _has_room(self) -> bool:
        """Whether another batch may be taken now."""

    @abc.abstractmethod
    def _step(self) -> bool:
        """Do what is next when no batch can be taken. Returns whether there was anything to do, or to wait for."""

    @abc.abstractmethod
    def _do(self, batch: _Batch) -> None:
        """Do the part of the thread, in it. Must not raise."""

    def serve(self, message: wire.Execute) -> None:
        """Execute a batch, and those that come meanwhile, until there is none, or another message is next.

        Raises `KernelGone`.
        """
        self.wanted = False
        if self._thread is None:
            self._start()
        self._reader.poll_ns = 0  # polling would take the interpreter's lock from the thread
        following: wire.Execute | None = message
        while following is not None or self._step():
            if following is not None:
                self._take(following)
            following = self._following()

    def _following(self) -> wire.Execute | None:
        """Remove and return the next batch, if there is one and it may be taken now."""
        waiting = self._reader.waiting
        if not waiting or not self._has_room():
            return None
        message = waiting[0]
        if not isinstance(message, wire.Execute):
            return None
        waiting.popleft()
        return message

    def _read(self, message: wire.Execute) -> tuple[list[WorkerRequest], Timings]:
        """Return the requests of a batch that begins now. Others may be in flight."""
        start_ns = time.monotonic_ns()
        opened = self._responder.open_overlapping(message.requests, collects=True)
        requests = self._inputs.read(opened)
        del opened  # it refers to inputs, as what is returned
        if message.tensors_traced:
            send_inputs(requests, self._send)
        return requests, Timings(start_ns, start_ns, start_ns)

    def _give(self, batch: _Batch) -> None:
        """Let the thread do its part, after its parts of the batches before."""
        self._in_flight.append(batch)
        self._given.put(batch)

    def _next_done(self) -> _Batch:
        """Remove and return the first batch that the thread has done with. There is one."""
        self._done_count -= 1
        return self._in_flight.popleft()

    def _end(self, batch: _Batch) -> None:
        """Report a batch whose requests have their responses."""
        # They refer to the inputs: any reference that is left is the model's.
        batch.requests.clear()
        finals = self._responder.close_overlapping([ref.number for ref in batch.message.requests])
        self._ended(batch.message, batch.timings, finals)

    def _wait(self) -> None:
        """Wait until the thread has done with a batch, or a message has come."""
        self._held.report_freed()
        for fd, _ in self._poller.poll():
            if fd == self._event_fd:
                self._done_count += os.eventfd_read(fd)
            else:
                self._poll()

    def _poll(self) -> None:
        self._reader.poll()
        if self._reader.gone:
            raise KernelGone

    # ---- the thread --------------------------------------------------------------------------

    def _start(self) -> None:
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._event_fd, select.POLLIN)
        self._poller.register(self._channel.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._do_all, name=self._thread_name, daemon=True)
        self._thread.start()

    def _do_all(self) -> None:
        """Do the thread's part of the batches, one after another. In a thread of its own, until `close`."""
        while True:
            batch = self._given.get()
            if batch is None:
                return
            self._do(batch)
            del batch  # it refers to inputs, and the main thread looks whether the model still has them
            os.eventfd_write(self._event_fd, 1)

    def close(self) -> None:
        """End the thread, for a process that continues. Waits for the batches in flight."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            os.close(self._event_fd)


class _Pipelined(BatchInThread):
    """A batch whose inputs are gathered before the thread computes it."""

    def __init__(self, message: wire.Execute, requests: list[WorkerRequest], timings: Timings) -> None:
        super().__init__(message, requests, timings)
        #: None before the inputs are gathered, and for a batch that only `Backend.execute` can execute.
        self.prepared: PreparedBatch | None = None
        self.prepared_ns = 0
        #: Whether it was computed, and how that has failed.
        self.computed = False
        self.failure: ServingError | None = None


class PipelinedBatches(ThreadedBatches[_Pipelined]):
    """The batches of one worker while it pipelines: the thread computes."""

    _thread_name = "naiad compute"

    def __init__(self, backend: Backend, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._backend = backend
        self._failures = LimitedLog(logger)
        #: A batch that waits until the thread is idle, because only `execute` can execute it.
        self._plain: _Pipelined | None = None

    # ---- the thread --------------------------------------------------------------------------

    def _start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        super()._start()

    def _do(self, batch: _Pipelined) -> None:
        assert batch.prepared is not None, "a batch is computed that was not prepared"
        if self._responder.any_cancelled(each.number for each in batch.message.requests):
            return  # the main thread executes the others
        self._channel.progress[0] = batch.message.batch << 1 | IN_MODEL
        batch.failure = self._tried(batch.prepared.run)
        batch.computed = True

    # ---- the main thread ---------------------------------------------------------------------

    @property
    def _given_count(self) -> int:
        """How many batches the thread has or will have."""
        return len(self._in_flight) - self._done_count

    def _has_room(self) -> bool:
        return self._given_count < _MOST_GIVEN and self._plain is None and not self._left_out()

    def _left_out(self) -> bool:
        """Whether the thread has left out the batch that is responded to next: the main thread executes it."""
        return self._done_count > 0 and not self._in_flight[0].computed

    def _following(self) -> wire.Execute | None:
        # Responses of a batch are written when the next one is computed.
        if self._done_count and not self._given_count:
            self._poll()
        return super()._following()

    def _step(self) -> bool:
        if self._done_count and not (self._left_out() and self._given_count):
            self._respond()
        elif self._plain is not None and not self._given_count:
            plain, self._plain = self._plain, None
            self._execute_plain(plain)
        elif self._given_count:
            self._wait()
        else:
            return False
        return True

    def _take(self, message: wire.Execute) -> None:
        """Read and gather a batch, and give it to the thread."""
        progress = self._channel.progress
        before = progress[0]
        progress[0] = message.batch << 1
        requests, timings = self._read(message)
        batch = _Pipelined(message, requests, timings)
        batch.prepared = self._prepared(requests, timings)
        batch.prepared_ns = time.monotonic_ns()
        if self._given_count:  # a worker that is lost now has not begun with this batch
            progress[0] = before
        if batch.prepared is None:
            self._plain = batch
        else:
            self._give(batch)

    def _prepared(self, requests: list[WorkerRequest], timings: Timings) -> PreparedBatch | None:
        try:
            return self._backend.prepare(requests, timings) if requests else None
        except Exception as error:
            self._failures.log("prepare", "the backend failed to prepare a batch", exc_info=error)
            return None

    def _respond(self) -> None:
        """Respond to the batch that was computed first."""
        batch = self._next_done()
        if not batch.computed:
            self._execute_plain(batch)
            return
        timings, gathered_ns = batch.timings, batch.prepared_ns - batch.timings.start_ns
        # The time between, in which another batch was computed, was spent in a queue.
        timings.start_ns = max(timings.start_ns, timings.inputs_ready_ns - gathered_ns)
        failure = batch.failure
        if failure is None:
            assert batch.prepared is not None, "a batch was computed that was not prepared"
            failure = self._tried(batch.prepared.respond)
        batch.prepared = None
        self._end_with(batch, failure)

    def _tried(self, action: Callable[[], None]) -> ServingError | None:
        """Do what a backend does with a batch. Returns how it has failed; raises nothing but `KernelGone`."""
        try:
            action()
        except KernelGone:
            raise
        except Exception as error:
            return failure_of(error, self._failures)
        return None

    def _execute_plain(self, batch: _Pipelined) -> None:
        """Execute a batch in this thread, while the other one is idle: it cannot be prepared, or some of its requests
        were cancelled."""
        batch.prepared = None
        number, requests = batch.message.batch, self._responder.without_cancelled(batch.requests)
        batch.requests = []
        self._channel.progress[0] = number << 1 | IN_MODEL
        now_ns = time.monotonic_ns()
        timings = batch.timings
        timings.start_ns = timings.inputs_ready_ns = timings.inferred_ns = now_ns
        if requests:
            self._execute(requests, timings)
        del requests
        self._end_with(batch, None)

    def _end_with(self, batch: _Pipelined, failure: ServingError | None) -> None:
        fail_unfinished(batch.requests, failure)
        self._end(batch)
