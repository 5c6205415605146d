"""Executes batches one after another, and works on the next and on the last one while a batch is computed.

A thread computes; the worker's main thread reads messages, gathers the inputs of the next batch, and responds to the
last one. So the model never waits for a batch that the worker has got. To wake another thread takes some microseconds:
only slow models with waiting requests are executed this way. All others, and a slow model with one client, are executed
in the main thread.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from backends.base import Timings
from backends.transport import wire
from backends.transport.outbox import IN_MODEL
from backends.worker.message_reader import KernelGone
from backends.worker.reports import send_inputs
from kernel.errors import InternalError, ServingError
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

logger = logging.getLogger(__name__)

#: Executions that take less time than this are not worth a switch of threads, in nanoseconds.
SLOW_NS = 200_000

#: How long a thread that has the interpreter's lock may keep it while another one wants it, in seconds. The default of
#: 5 ms would let the computing thread wait for the end of a large gather.
SWITCH_INTERVAL_S = 50e-6

#: A batch that is computed, and one that is ready to be.
_MOST_GIVEN = 2


class _Pipelined:
    """A batch from its message to its responses."""

    def __init__(self, message: wire.Execute, requests: list[WorkerRequest], timings: Timings) -> None:
        self.message = message
        self.requests = requests
        self.timings = timings
        #: None before the inputs are gathered, and for a batch that only `Backend.execute` can execute.
        self.prepared: PreparedBatch | None = None
        self.prepared_ns = 0
        #: Whether it was computed, and how that has failed.
        self.computed = False
        self.failure: ServingError | None = None


class PipelinedBatches:
    """The batches of one worker while it pipelines. The main thread calls all methods."""

    def __init__(
        self,
        backend: Backend,
        channel: BlockingChannel,
        reader: KernelMessageReader,
        inputs: InputReader,
        responder: BatchResponder,
        held: HeldInputs,
        send: Callable[[wire.ToKernel], None],
        execute: Callable[[list[WorkerRequest], Timings], None],
        ended: Callable[[wire.Execute, Timings, list[wire.ResponseMessage]], None],
    ) -> None:
        """`execute` executes a batch in the main thread, and responds. `ended` reports a batch that has its
        responses."""
        self._backend = backend
        self._channel = channel
        self._reader = reader
        self._inputs = inputs
        self._responder = responder
        self._held = held
        self._send = send
        self._execute = execute
        self._ended = ended
        self._failures = LimitedLog(logger)
        #: Whether the next batch is for `serve`: it came while a batch was executed.
        self.wanted = False
        #: Whether the thread runs.
        self._started = False
        #: For the thread: batches to compute, in order; from it: those that it has ended.
        self._given: SimpleQueue[_Pipelined] = SimpleQueue()
        self._computed: deque[_Pipelined] = deque()
        #: How many the thread has or will have, and how many it has ended that the main thread has not responded to.
        self._given_count = 0
        self._computed_count = 0
        #: A batch that waits until the thread is idle, because only `execute` can execute it.
        self._plain: _Pipelined | None = None

    def serve(self, message: wire.Execute) -> None:
        """Execute a batch, and those that come meanwhile, until there is none, or another message is next.

        Raises `KernelGone`.
        """
        self.wanted = False
        if not self._started:
            self._start()
        self._reader.poll_ns = 0  # polling would take the interpreter's lock and a processor from the model
        following: wire.Execute | None = message
        while True:
            if following is not None:
                self._take(following)
            elif self._computed_count and not (self._left_out() and self._given_count):
                self._respond()
            elif self._plain is not None and not self._given_count:
                plain, self._plain = self._plain, None
                self._execute_plain(plain)
            elif self._given_count:
                self._wait()
            else:
                return
            # Responses of a batch are written when the next one is computed.
            if self._computed_count and not self._given_count:
                self._poll()
            following = self._following()

    # ---- the thread --------------------------------------------------------------------------

    def _start(self) -> None:
        self._started = True
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._event_fd, select.POLLIN)
        self._poller.register(self._channel.fileno(), select.POLLIN)
        threading.Thread(target=self._compute_all, name="naiad compute", daemon=True).start()

    def _compute_all(self) -> None:
        """Compute the batches that are given, one after another. In a thread of its own, for ever."""
        given, computed = self._given, self._computed
        while True:
            batch = given.get()
            self._compute(batch)
            computed.append(batch)
            del batch  # it refers to inputs, and the main thread looks whether the model still has them
            os.eventfd_write(self._event_fd, 1)

    def _compute(self, batch: _Pipelined) -> None:
        assert batch.prepared is not None, "a batch is computed that was not prepared"
        if self._responder.any_cancelled(each.number for each in batch.message.requests):
            return  # the main thread executes the others
        self._channel.progress[0] = batch.message.batch << 1 | IN_MODEL
        try:
            batch.prepared.run()
        except ServingError as error:
            batch.failure = error.with_traceback(None)  # the traceback refers to the inputs
        except Exception as error:
            self._failures.log("the model", "the model failed", exc_info=error)
            batch.failure = InternalError(f"{type(error).__name__}: {error}")
        batch.computed = True

    # ---- the main thread ---------------------------------------------------------------------

    def _following(self) -> wire.Execute | None:
        """Remove and return the next batch, if there is one and it can be prepared now."""
        waiting = self._reader.waiting
        if self._given_count == _MOST_GIVEN or self._plain is not None or not waiting or self._left_out():
            return None
        message = waiting[0]
        if not isinstance(message, wire.Execute):
            return None
        waiting.popleft()
        return message

    def _left_out(self) -> bool:
        """Whether the thread has left out the batch that is responded to next: the main thread executes it."""
        return self._computed_count > 0 and not self._computed[0].computed

    def _take(self, message: wire.Execute) -> None:
        """Read and gather a batch, and give it to the thread."""
        start_ns = time.monotonic_ns()
        progress = self._channel.progress
        before = progress[0]
        progress[0] = message.batch << 1
        opened = self._responder.open_overlapping(message.requests, collects=True)
        requests = self._inputs.read(opened)
        del opened
        if message.tensors_traced:
            send_inputs(requests, self._send)
        timings = Timings(start_ns, start_ns, start_ns)
        batch = _Pipelined(message, requests, timings)
        batch.prepared = self._prepared(requests, timings)
        batch.prepared_ns = time.monotonic_ns()
        if self._given_count:  # a worker that is lost now has not begun with this batch
            progress[0] = before
        if batch.prepared is None:
            self._plain = batch
        else:
            self._given_count += 1
            self._given.put(batch)

    def _prepared(self, requests: list[WorkerRequest], timings: Timings) -> PreparedBatch | None:
        try:
            return self._backend.prepare(requests, timings) if requests else None
        except Exception as error:
            self._failures.log("prepare", "the backend failed to prepare a batch", exc_info=error)
            return None

    def _wait(self) -> None:
        """Wait until a batch is computed, or a message has come."""
        self._held.report_freed()
        for fd, _ in self._poller.poll():
            if fd == self._event_fd:
                count = os.eventfd_read(fd)
                self._computed_count += count
                self._given_count -= count
            else:
                self._poll()

    def _poll(self) -> None:
        self._reader.poll()
        if self._reader.gone:
            raise KernelGone

    def _respond(self) -> None:
        """Respond to the batch that was computed first."""
        self._computed_count -= 1
        batch = self._computed.popleft()
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
        self._end(batch, failure)

    def _tried(self, respond: Callable[[], None]) -> ServingError | None:
        try:
            respond()
        except KernelGone:
            raise
        except ServingError as error:
            return error.with_traceback(None)  # the traceback refers to the inputs
        except Exception as error:
            self._failures.log("the model", "the model failed", exc_info=error)
            return InternalError(f"{type(error).__name__}: {error}")
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
        self._end(batch, None)

    def _end(self, batch: _Pipelined, failure: ServingError | None) -> None:
        for request in batch.requests:
            if not request.finished:
                request.fail(failure or InternalError("the backend did not respond to the request"))
        # They refer to the inputs: any reference that is left is the model's.
        batch.requests.clear()
        finals = self._responder.close_overlapping([ref.number for ref in batch.message.requests])
        self._ended(batch.message, batch.timings, finals)
