"""Executes batches on a GPU one after another, and enqueues the next one before it waits for the last one.

The copies of a batch have streams of their own then (`InstanceDevice.begin_overlapping`): inputs are copied while the
batch before is computed, and outputs while the next one is. The main thread reads messages, enqueues and responds; a
thread waits for the device. Only batches that take long are worth it: others, and those of a single client, are
enqueued and waited for in the main thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backends.transport.outbox import IN_MODEL
from backends.worker.pipelined_batches import SLOW_NS, BatchInThread, ThreadedBatches

if TYPE_CHECKING:
    from backends.base import Timings
    from backends.transport import wire
    from backends.worker.devices.batch_on_device import EnqueuedBatch, Stages
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.pipelined_batches import WorkerParts
    from backends.worker.request import WorkerRequest

#: One is computed, while the next one is copied to the device or the last one from it.
_MOST_IN_FLIGHT = 2


class _Enqueued(BatchInThread):
    """A batch that is on the device, or was."""

    def __init__(
        self, message: wire.Execute, requests: list[WorkerRequest], timings: Timings, enqueued: EnqueuedBatch
    ) -> None:
        super().__init__(message, requests, timings)
        self.enqueued = enqueued


class DeviceBatches(ThreadedBatches[_Enqueued]):
    """The batches of one worker while they overlap on its device: the thread waits for that."""

    _thread_name = "naiad device"

    def __init__(self, device: InstanceDevice, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._device = device
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
        """As `ThreadedBatches.serve`."""
        self._computed_ns = 0
        super().serve(message)

    def _has_room(self) -> bool:
        return len(self._in_flight) < _MOST_IN_FLIGHT

    def _step(self) -> bool:
        if self._done_count:
            self._respond()
        elif self._in_flight:
            self._wait()
        else:
            return False
        return True

    def _take(self, message: wire.Execute) -> None:
        """Read a batch, and enqueue all of it, with its responses."""
        self._channel.progress[0] = begun = message.batch << 1
        requests, timings = self._read(message)
        self._device.begin_overlapping()
        if requests:
            self._channel.progress[0] = begun | IN_MODEL
            self._execute(requests, timings)
        self._give(_Enqueued(message, requests, timings, self._device.end_overlapping()))

    def _do(self, batch: _Enqueued) -> None:
        batch.enqueued.wait()

    def _respond(self) -> None:
        """Respond to the batch that was done first."""
        batch = self._next_done()
        stages = batch.enqueued.finish()
        mark_stages(batch.timings, stages, batch.enqueued.ended_ns, before_ns=self._computed_ns)
        self._computed_ns = batch.timings.inferred_ns
        self._end(batch)


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
