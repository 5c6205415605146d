"""Executes batches on a GPU one after another, and enqueues the next one before it waits for the last one.

The copies of a batch have streams of their own then (`InstanceDevice.begin_overlapping`): inputs are copied while the
batch before is computed, and outputs while the next one is. The main thread reads messages, enqueues and responds; a
thread waits for the device. Only batches that take long are worth it: others, and those of a single client, are
enqueued and waited for in the main thread.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from backends.base import Timings
from backends.transport import wire
from backends.transport.outbox import IN_MODEL
from backends.worker.message_reader import KernelGone
from backends.worker.pipelined_batches import SLOW_NS
from backends.worker.reports import send_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.transport.channel import BlockingChannel
    from backends.worker.devices.batch_on_device import EnqueuedBatch, Stages
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.held_inputs import HeldInputs
    from backends.worker.inputs import InputReader
    from backends.worker.message_reader import KernelMessageReader
    from backends.worker.request import WorkerRequest
    from backends.worker.responder import BatchResponder

#: One is computed, while the next one is copied to the device or the last one from it.
_MOST_IN_FLIGHT = 2


class _InFlight:
    """A batch from its message to its responses."""

    def __init__(
        self, message: wire.Execute, requests: list[WorkerRequest], timings: Timings, enqueued: EnqueuedBatch
    ) -> None:
        self.message = message
        self.requests = requests
        self.timings = timings
        self.enqueued = enqueued


class DeviceBatches:
    """The batches of one worker while they overlap on its device. The main thread calls all methods."""

    def __init__(
        self,
        device: InstanceDevice,
        channel: BlockingChannel,
        reader: KernelMessageReader,
        inputs: InputReader,
        responder: BatchResponder,
        held: HeldInputs,
        send: Callable[[wire.ToKernel], None],
        execute: Callable[[list[WorkerRequest], Timings], None],
        ended: Callable[[wire.Execute, Timings, list[wire.ResponseMessage]], None],
    ) -> None:
        """`execute` enqueues a batch, with its responses, and raises nothing but `KernelGone`. `ended` reports a batch
        that has its responses."""
        self._device = device
        self._channel = channel
        self._reader = reader
        self._inputs = inputs
        self._responder = responder
        self._held = held
        self._send = send
        self._execute = execute
        self._ended = ended
        #: Whether the next batch is for `serve`: it came while a batch was computed.
        self.wanted = False
        self._started = False
        #: In the order in which they were enqueued. The first `_done_count` are done.
        self._in_flight: deque[_InFlight] = deque()
        self._done_count = 0
        #: For the thread.
        self._given: SimpleQueue[EnqueuedBatch | None] = SimpleQueue()
        #: When the outputs of the last batch were computed.
        self._computed_ns = 0

    def ended_alone(self, timings: Timings) -> bool:
        """Mark the stages of a batch that did not overlap, and was waited for. Returns whether it took long."""
        now_ns = time.monotonic_ns()
        slow = now_ns - timings.start_ns > SLOW_NS
        stages = self._device.stages
        if stages is None:
            timings.inferred_ns = now_ns
        else:
            mark_stages(timings, stages, now_ns, before_ns=0)
        self._device.timed = slow
        return slow

    def serve(self, message: wire.Execute) -> None:
        """Execute a batch, and those that come meanwhile, until there is none, or another message is next.

        Raises `KernelGone`.
        """
        self.wanted = False
        if not self._started:
            self._start()
        self._reader.poll_ns = 0  # polling would take the interpreter's lock from the thread
        self._computed_ns = 0
        following: wire.Execute | None = message
        while True:
            if following is not None:
                self._enqueue(following)
            elif self._done_count:
                self._respond()
            elif self._in_flight:
                self._wait()
            else:
                return
            following = self._following()

    def _following(self) -> wire.Execute | None:
        """Remove and return the next batch, if there is one and it may be enqueued now."""
        waiting = self._reader.waiting
        if len(self._in_flight) >= _MOST_IN_FLIGHT or not waiting:
            return None
        message = waiting[0]
        if not isinstance(message, wire.Execute):
            return None
        waiting.popleft()
        return message

    def _enqueue(self, message: wire.Execute) -> None:
        """Read a batch, and enqueue all of it, with its responses."""
        start_ns = time.monotonic_ns()
        self._channel.progress[0] = begun = message.batch << 1
        opened = self._responder.open_overlapping(message.requests, collects=True)
        requests = self._inputs.read(opened)
        del opened
        if message.tensors_traced:
            send_inputs(requests, self._send)
        timings = Timings(start_ns, start_ns, start_ns)
        self._device.begin_overlapping()
        if requests:
            self._channel.progress[0] = begun | IN_MODEL
            self._execute(requests, timings)
        enqueued = self._device.end_overlapping()
        self._in_flight.append(_InFlight(message, requests, timings, enqueued))
        self._given.put(enqueued)

    def _respond(self) -> None:
        """Respond to the batch that was done first."""
        self._done_count -= 1
        batch = self._in_flight.popleft()
        stages = batch.enqueued.finish()
        mark_stages(batch.timings, stages, batch.enqueued.ended_ns, before_ns=self._computed_ns)
        self._computed_ns = batch.timings.inferred_ns
        # They refer to the inputs: any reference that is left is the model's.
        batch.requests.clear()
        finals = self._responder.close_overlapping([ref.number for ref in batch.message.requests])
        self._ended(batch.message, batch.timings, finals)

    def _wait(self) -> None:
        """Wait until a batch is done, or a message has come."""
        self._held.report_freed()
        for fd, _ in self._poller.poll():
            if fd == self._event_fd:
                self._done_count += os.eventfd_read(fd)
            else:
                self._reader.poll()
                if self._reader.gone:
                    raise KernelGone

    # ---- the thread --------------------------------------------------------------------------

    def _start(self) -> None:
        self._started = True
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._event_fd, select.POLLIN)
        self._poller.register(self._channel.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._wait_for_all, name="naiad device", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, for a process that continues. Waits for the batches in flight."""
        if self._started:
            self._given.put(None)
            self._thread.join()
            os.close(self._event_fd)

    def _wait_for_all(self) -> None:
        """Wait for the batches one after another. In a thread of its own, until `close`."""
        while True:
            batch = self._given.get()
            if batch is None:
                return
            batch.wait()
            del batch  # it refers to inputs, and the main thread looks whether the model still has them
            os.eventfd_write(self._event_fd, 1)


def mark_stages(timings: Timings, stages: Stages, ended_ns: int, *, before_ns: int) -> None:
    """Set the times of a batch that has ended; `before_ns` is when the outputs of the one before were computed. Pure.

    The times of the device are counted back from the end. A batch whose inputs were there before the device was free
    has waited in a queue, so that it begins later by this time.
    """
    begun_ns, enqueued_ns = timings.start_ns, timings.inputs_ready_ns
    there_ns = enqueued_ns if stages.input_ns is None else max(begun_ns, ended_ns - stages.input_ns)
    computed_ns = min(max(ended_ns - stages.output_ns, begun_ns), ended_ns)
    inputs_ready_ns = min(max(there_ns, before_ns), computed_ns)
    timings.start_ns = min(max(begun_ns, inputs_ready_ns - (there_ns - begun_ns)), inputs_ready_ns)
    timings.inputs_ready_ns, timings.inferred_ns = inputs_ready_ns, computed_ns
