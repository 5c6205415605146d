"""How many requests a model serves, and how long they wait, when its instance gets batches ahead of time and when not.

The scheduler and the instances are the real ones. One instance is simulated with all that stands between two batches:
messages need some time, and a worker gathers inputs before it computes and responds after that. It pipelines, as
`backends.worker.pipelined_batches`, or does one after another, as workers of other backends. Clients send a
request, wait for the response, and send the next one; or requests come at random times. An instance on a GPU has
copies to and from it, which overlap as `backends.worker.devices.device_batches` lets them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from random import Random
from typing import TYPE_CHECKING

import msgspec

from backends.base import Timings
from backends.worker.devices.batch_on_device import Stages
from backends.worker.devices.device_batches import mark_stages
from kernel.observe.execution_reports import ExecutionTimes
from kernel.serving.events import Submitted
from kernel.serving.next_batch_time import NextBatchTime
from kernel.serving.response import Response
from kernel.testing import Lab, model_spec
from schedulers.registry import choose_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.spec import DynamicBatching
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request

US = 1_000
MS = 1_000_000

#: What a thread takes to wake up when the device is done.
WAKE_NS = 40 * US


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its worker and its clients. Times are nanoseconds."""

    #: Rows → how long an execution takes, with a random part.
    execution_ns: Callable[[int, Random], int]
    #: Closed loop: how many clients there are, and how long each does other things between two requests.
    clients: int = 0
    thinking_ns: int = 50 * US
    #: Open loop: the mean time between two requests.
    gap_ns: int = 0
    #: None for a model without batching.
    batching: DynamicBatching | None = None
    max_batch_size: int = 16
    pipelines: bool = True
    #: Of an instance on a GPU: how long the inputs of a batch are copied, and the outputs; None for one on the CPU.
    copy_ns: int | None = None
    #: A message on its way between kernel and worker.
    message_ns: int = 60 * US
    #: The worker's own work for a batch, before and after it computes, and for each request of it.
    batch_ns: int = 40 * US
    request_ns: int = 5 * US


class Measured(msgspec.Struct, frozen=True):
    """What clients have seen in one run."""

    per_s: float
    mean_wait_ns: float
    #: The mean number of requests in a batch.
    batch: float


def measured(pattern: Pattern, *, ahead: bool, seed: int = 0, duration_ns: int = 2_000 * MS) -> Measured:
    """Run a pattern for `duration_ns`, of which the first quarter does not count."""
    kind = _Run if pattern.copy_ns is None else _DeviceRun
    return kind(pattern, seed, ahead=ahead).result(duration_ns)


class _Never(NextBatchTime):
    """A slow model gets nothing ahead of time."""

    def dispatch_ns(self, begun_ns: int, rows: int) -> int | None:
        return None


class _Run:
    """One run. Its events are in the order of their times."""

    def __init__(self, pattern: Pattern, seed: int, *, ahead: bool) -> None:
        self.pattern = pattern
        self.random, self.arrivals = Random(seed), Random(seed + 1)
        spec = model_spec(max_batch_size=pattern.max_batch_size, dynamic_batching=pattern.batching)
        self.lab = Lab(spec, choose_scheduler, 1)
        if not ahead:
            self.lab.instances._next_batch_time = _Never()
        self.clock = self.lab.clock
        self.start_ns = self.clock.time_ns
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._sent: dict[Request, int] = {}
        self._seen = 0
        self.worker = self.lab.workers[0]
        #: Batches that the worker was sent, and one that is gathered and not computed, with the start of the gathering.
        self.arrived: deque[Batch] = deque()
        self.ready: deque[tuple[Batch, int]] = deque()
        self.gathering = self.computes = False
        #: Whether a worker that does not pipeline has a batch.
        self.busy = False
        self.main_free_ns = 0
        self.waits: list[tuple[int, int]] = []
        self.batches: list[int] = []

    def result(self, duration_ns: int) -> Measured:
        pattern = self.pattern
        for number in range(pattern.clients):
            self.at(self.start_ns + number * 7 * US, self.send)
        if pattern.gap_ns:
            self.at(self.start_ns, self.arrive)
        end_ns = self.start_ns + duration_ns
        while (next_ns := min(self._next_alarm_ns(end_ns), self._events[0][0] if self._events else end_ns)) < end_ns:
            self.advance(next_ns)
            if self._events and self._events[0][0] <= next_ns:
                heapq.heappop(self._events)[2]()
                self.clock.end_iteration()
                self.take_dispatched()
        from_ns = self.start_ns + duration_ns // 4
        waits = [wait for at_ns, wait in self.waits if at_ns >= from_ns]
        assert waits, "no request was served"
        count = len(self.batches)
        return Measured(len(waits) * 1e9 / (end_ns - from_ns), sum(waits) / len(waits), sum(self.batches) / count)

    def at(self, at_ns: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._numbers), event))

    def advance(self, at_ns: int) -> None:
        """Let time pass, up to the next alarm at most; what the scheduler dispatches then is sent at that time."""
        self.clock.advance(max(0, at_ns - self.clock.time_ns))
        self.take_dispatched()

    def _next_alarm_ns(self, default_ns: int) -> int:
        return min((alarm.at_ns for alarm in self.clock.alarms if alarm.at_ns), default=default_ns)

    # ---- clients -----------------------------------------------------------------------------

    def send(self) -> None:
        request = self.lab.request("r")
        request.queue_start_ns = self.clock.time_ns
        self._sent[request] = self.clock.time_ns
        self.lab.inbox.post(Submitted(request))

    def arrive(self) -> None:
        self.send()
        self.at(self.clock.time_ns + int(self.arrivals.expovariate(1 / self.pattern.gap_ns)), self.arrive)

    # ---- the worker --------------------------------------------------------------------------

    def take_dispatched(self) -> None:
        """Send the worker what was dispatched since the last time."""
        for batch in itertools.islice(self.worker.batches, self._seen, None):
            self.at(self.clock.time_ns + self.pattern.message_ns, lambda batch=batch: self.receive(batch))  # type: ignore[misc]
        self._seen = len(self.worker.batches)

    def receive(self, batch: Batch) -> None:
        self.arrived.append(batch)
        self.gather_next()

    def own_ns(self, batch: Batch) -> int:
        return self.pattern.batch_ns + self.pattern.request_ns * len(batch.requests)

    def gather_next(self) -> None:
        """Gather a batch if the main thread may: at most one beyond that which is computed."""
        may = self.pattern.pipelines or not self.busy
        if self.arrived and may and not self.gathering and not self.ready:
            batch = self.arrived.popleft()
            self.gathering = self.busy = True
            begun_ns = max(self.clock.time_ns, self.main_free_ns)
            self.main_free_ns = begun_ns + self.own_ns(batch)
            self.at(self.main_free_ns, lambda: self.gathered(batch, begun_ns))

    def gathered(self, batch: Batch, begun_ns: int) -> None:
        self.gathering = False
        self.ready.append((batch, begun_ns))
        self.compute_next()

    def compute_next(self) -> None:
        if self.computes or not self.ready:
            return
        batch, begun_ns = self.ready.popleft()
        self.computes = True
        now_ns = self.clock.time_ns
        start_ns = max(begun_ns, now_ns - self.own_ns(batch))
        took_ns = self.pattern.execution_ns(len(batch.requests), self.random)
        self.at(now_ns + took_ns, lambda: self.end(batch, start_ns, now_ns))
        self.gather_next()

    def end(self, batch: Batch, start_ns: int, computed_from_ns: int) -> None:
        """The model has computed a batch: respond to it, after the next one was begun."""
        now_ns = self.clock.time_ns
        self.computes = False
        self.compute_next()
        done_ns = max(now_ns, self.main_free_ns) + self.own_ns(batch)
        self.main_free_ns = done_ns
        times = ExecutionTimes(start_ns, computed_from_ns, now_ns, done_ns)
        self.at(done_ns, self.responded)
        self.at(done_ns + self.pattern.message_ns, lambda: self.executed(batch, times))

    def responded(self) -> None:
        self.busy = False
        self.gather_next()

    def executed(self, batch: Batch, times: ExecutionTimes) -> None:
        """The kernel has the responses."""
        assert self.worker.batches[0] is batch
        self.worker.batches.popleft()
        self._seen -= 1
        self.batches.append(len(batch.requests))
        now_ns = self.clock.time_ns
        for request in batch.requests:
            request.respond(Response(request.model_name, "1", request.id, outputs=[]))
            self.waits.append((now_ns, now_ns - self._sent.pop(request)))
            if self.pattern.clients:
                self.at(now_ns + self.pattern.thinking_ns, self.send)
        self.worker.record.executed(batch.number)
        self.lab.instances.executed(self.worker, batch, times)


class _DeviceRun(_Run):
    """One run of an instance on a GPU. With batches ahead of time they overlap; without, there is one at a time."""

    def __init__(self, pattern: Pattern, seed: int, *, ahead: bool) -> None:
        super().__init__(pattern, seed, ahead=ahead)
        self.most = 2 if ahead else 1
        self.worker.record.overlaps = ahead
        self.in_flight = 0
        #: When the engines of the device are free: copies in, computation, copies out.
        self.free_ns = [0, 0, 0]
        self.computed_ns = 0

    def gather_next(self) -> None:
        while self.arrived and self.in_flight < self.most:
            batch = self.arrived.popleft()
            self.in_flight += 1
            begun_ns = max(self.clock.time_ns, self.main_free_ns)
            self.main_free_ns = enqueued_ns = begun_ns + self.own_ns(batch)
            self.at(enqueued_ns, lambda batch=batch, begun_ns=begun_ns: self.enqueue(batch, begun_ns))  # type: ignore[misc]

    def enqueue(self, batch: Batch, begun_ns: int) -> None:
        """Put a batch behind those before on each engine."""
        copy_ns = self.pattern.copy_ns
        assert copy_ns is not None
        took_ns = copy_ns, self.pattern.execution_ns(len(batch.requests), self.random), copy_ns
        end_ns = enqueued_ns = self.clock.time_ns
        ends: list[int] = []
        for engine, each_ns in enumerate(took_ns):
            end_ns = self.free_ns[engine] = max(end_ns, self.free_ns[engine]) + each_ns
            ends.append(end_ns)
        timings = Timings(begun_ns, enqueued_ns, enqueued_ns)
        self.at(end_ns, lambda: self.done(batch, timings, Stages(end_ns - ends[0], end_ns - ends[1])))

    def done(self, batch: Batch, timings: Timings, stages: Stages) -> None:
        ended_ns = self.clock.time_ns
        mark_stages(timings, stages, ended_ns, before_ns=self.computed_ns)
        self.computed_ns = timings.inferred_ns
        done_ns = max(ended_ns + WAKE_NS, self.main_free_ns) + self.own_ns(batch)
        self.main_free_ns = done_ns
        times = ExecutionTimes(timings.start_ns, timings.inputs_ready_ns, timings.inferred_ns, done_ns)
        self.at(done_ns, self.one_left)
        self.at(done_ns + self.pattern.message_ns, lambda: self.executed(batch, times))

    def one_left(self) -> None:
        self.in_flight -= 1
        self.gather_next()
