"""Fakes for tests of schedulers and other code that is driven by events: a clock, instances, requests.

Public: authors of schedulers use them in their tests. `Lab` combines them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kernel.config.spec import DynamicBatching, ModelSpec, SequenceBatching, TensorSpec
from kernel.errors import WorkerLost
from kernel.loop.clock import ITERATION_END
from kernel.observe.execution_reports import ExecutionTimes
from kernel.observe.statistics import ModelStatistics
from kernel.serving.events import Submitted
from kernel.serving.inbox import Inbox
from kernel.serving.instance import BatchRecord
from kernel.serving.instances import InstanceSet, LiveRequests
from kernel.serving.live_sequences import LiveSequences
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.serving.sequence_model import SequenceInstances
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.serving.batch import Batch
    from kernel.serving.model import SchedulerFactory


def model_spec(
    name: str = "model",
    *,
    max_batch_size: int = 0,
    dims: tuple[int, ...] = (1,),
    dynamic_batching: DynamicBatching | None = None,
    sequence_batching: SequenceBatching | None = None,
    decoupled: bool = False,
    parameters: dict[str, str] | None = None,
) -> ModelSpec:
    """Return the spec of a model with one FP32 input `IN` and one output `OUT`."""
    shape = (-1, *dims) if max_batch_size else dims
    return ModelSpec(
        name=name,
        platform="",
        backend="identity",
        max_batch_size=max_batch_size,
        inputs={"IN": TensorSpec("IN", "FP32", dims, shape)},
        outputs={"OUT": TensorSpec("OUT", "FP32", dims, shape)},
        dynamic_batching=dynamic_batching,
        sequence_batching=sequence_batching,
        decoupled=decoupled,
        parameters=parameters or {},
    )


class FakeClock:
    """A clock that moves only by `advance`. Alarms ring in the order of their times."""

    def __init__(self) -> None:
        #: The time, in nanoseconds. Tests move it by `advance`.
        self.time_ns = 1_000_000_000
        #: All that were made, also closed ones.
        self.alarms: list[FakeAlarm] = []

    def now_ns(self) -> int:
        """Return the time, in nanoseconds."""
        return self.time_ns

    def wall_ns(self) -> int:
        """Return the same time: this clock has no other one."""
        return self.time_ns

    def alarm(self, callback: Callable[[], None]) -> FakeAlarm:
        """Return an alarm that calls `callback` when its time has come."""
        alarm = FakeAlarm(self, callback)
        self.alarms.append(alarm)
        return alarm

    def end_iteration(self) -> None:
        """End the event-loop iteration: ring the alarms that are set to `ITERATION_END`."""
        for alarm in self.alarms:
            if alarm.at_ns == ITERATION_END:
                alarm.ring()

    def advance(self, ns: int) -> None:
        """End the iteration and let `ns` nanoseconds pass. Each alarm that is due rings at its time."""
        self.end_iteration()
        end_ns = self.time_ns + ns
        while due := [a for a in self.alarms if a.at_ns is not None and ITERATION_END < a.at_ns <= end_ns]:
            alarm = min(due, key=lambda a: a.at_ns or 0)
            assert alarm.at_ns is not None
            self.time_ns = max(self.time_ns, alarm.at_ns)  # a test may let the time jump over alarms
            alarm.ring()
            self.end_iteration()
        self.time_ns = end_ns


class FakeAlarm:
    """Refuses a time that is neither in the future nor `ITERATION_END`: a real loop would never sleep."""

    def __init__(self, clock: FakeClock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._callback = callback
        self.at_ns: int | None = None

    def set(self, at_ns: int | None) -> None:
        assert at_ns is None or at_ns == ITERATION_END or at_ns > self._clock.now_ns(), (
            "an alarm must be set in the future"
        )
        self.at_ns = at_ns

    def close(self) -> None:
        self.at_ns = None

    def ring(self) -> None:
        self.at_ns = None
        self._callback()


class RecordingSink:
    """Records the responses of a request."""

    #: Nobody: the request is not a client's.
    peer = ""

    def __init__(self) -> None:
        #: The responses, in their order.
        self.responses: list[Response] = []
        #: What the request's headers are: name in lower case → value.
        self.headers: dict[str, str] = {}

    def header(self, name: str) -> str:
        """Return a header of the request, "" without it."""
        return self.headers.get(name, "")

    def send(self, response: Response) -> None:
        """Record a response."""
        self.responses.append(response)

    @property
    def errors(self) -> list[ServingError]:
        """The errors among the responses, in their order."""
        return [r.error for r in self.responses if r.error is not None]


class FakeInstance:
    """An instance that keeps its batches until the test calls `Lab.finish` for each of them."""

    def __init__(self, name: str, concurrency: int = 1) -> None:
        self.name = name
        self.record = BatchRecord(concurrency)
        #: The batches that it has, the one that it executes first.
        self.batches: deque[Batch] = deque()
        #: The requests that were cancelled while it had them.
        self.cancelled: list[Request] = []
        #: The slots that sequences have left.
        self.ended_slots: list[int] = []
        #: How often its messages were sent at once.
        self.sent_now = 0

    def execute(self, batch: Batch) -> None:
        """Keep a batch; the kernel calls it."""
        self.batches.append(batch)

    def cancel(self, request: Request) -> None:
        """Note a cancelled request; the kernel calls it."""
        self.cancelled.append(request)

    def consumed(self, request: Request, count: int) -> None:
        """Do nothing: fake instances do not limit their responses."""

    def send_now(self) -> None:
        """Count in `sent_now`; the kernel calls it for the batch of a call."""
        self.sent_now += 1

    def end_sequence(self, slot: int) -> None:
        """Note a slot whose sequence has ended; the kernel calls it."""
        self.ended_slots.append(slot)


class Lab:
    """A scheduler with a fake clock and fake instances."""

    def __init__(self, spec: ModelSpec, schedule: SchedulerFactory, instances: int = 1) -> None:
        self.spec = spec
        self.clock = FakeClock()
        self.crashes: list[Exception] = []
        self.inbox = Inbox(self.clock, self.crashes.append)
        self.statistics = ModelStatistics()
        self.live = LiveRequests()
        self.instances = InstanceSet(self.inbox, self.live, self.statistics, self.clock)
        #: Only of a model with sequences.
        self.sequences = LiveSequences(spec.name, spec.sequence_batching or SequenceBatching())
        if spec.sequence_batching is not None:
            self.instances = SequenceInstances(self.inbox, self.live, self.statistics, self.clock, self.sequences)
        self.workers = [FakeInstance(f"{spec.name}_{number}") for number in range(instances)]
        self.inbox.start(schedule(spec, self.inbox, self.instances, self.clock))
        for worker in self.workers:
            self.instances.add(worker)

    def request(self, id: str, rows: int = 1, *, priority: int = 0, timeout_us: int = 0,
                shape: list[int] | None = None) -> Request:  # fmt: skip
        """Return a live request with the current time as its queue start. It is not posted to the scheduler."""
        tensor = Tensor("IN", "FP32", [rows, *(shape or [1])], b"")
        request = Request(self.spec.name, [tensor], RecordingSink(), id=id)
        request.batch_size = rows
        request.priority = priority
        request.timeout_us = timeout_us
        request.queue_start_ns = request.received_ns = self.clock.now_ns()
        request.owner = _LabOwner(self.live)
        self.live.add(request)
        return request

    def submit_to_sequence(
        self, sequence: int | str, *, id: str = "", start: bool = False, end: bool = False, timeout_us: int = 0,
        shape: list[int] | None = None,
    ) -> Request:  # fmt: skip
        """Post a request of a sequence and return it. Raises what `LiveSequences.admit` raises."""
        request = self.request(id, timeout_us=timeout_us, shape=shape)
        request.correlation_id, request.sequence_start, request.sequence_end = sequence, start, end
        try:
            self.sequences.admit(request)
        except BaseException:
            self.live.remove(request)
            raise
        self.inbox.post(Submitted(request))
        return request

    @property
    def running(self) -> list[list[str]]:
        """The ids of the requests in the first batch of each busy instance."""
        return [[r.id for r in w.batches[0].requests] for w in self.workers if w.batches]

    @property
    def ahead(self) -> list[list[str]]:
        """The ids of the requests that were dispatched ahead of time, by batch."""
        return [[r.id for r in batch.requests] for w in self.workers for batch in list(w.batches)[1:]]

    def finish(self, worker: int = 0, *, infer_ns: int = 1_000_000) -> None:
        """Let an instance finish its first batch, with an execution time of `infer_ns` nanoseconds."""
        instance = self.workers[worker]
        batch = instance.batches.popleft()
        for request in batch.requests:
            request.respond(Response(request.model_name, "1", request.id, outputs=[]))
        end_ns = self.clock.now_ns()
        times = ExecutionTimes(end_ns - infer_ns, end_ns - infer_ns, end_ns, end_ns)
        instance.record.executed(batch.number)
        self.instances.executed(instance, batch, times)

    def lose(self, worker: int = 0) -> None:
        """Let an instance be lost: requests that it executes fail, and those that it had not started come back."""
        instance = self.workers[worker]
        unstarted = instance.record.unstarted()
        started = [batch for batch in instance.record.batches.values() if batch not in unstarted]
        instance.batches.clear()
        instance.record = BatchRecord(instance.record.concurrency)
        self.instances.forget(instance)
        for batch in started:
            for request in batch.requests:
                request.fail(WorkerLost(instance.name, "exit code 1"))
        self.instances.lost(instance, [request for batch in unstarted for request in batch.requests])

    def check(self) -> None:
        """Recompute the invariants of requests and batches."""
        self.instances.check()


class _LabOwner:
    """Removes requests with a final response from the record of live requests, as a model version does."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live

    def responded(self, request: Request, response: Response) -> None:
        if response.final:
            self._live.remove(request)

    def consumed(self, request: Request, count: int) -> None:
        """Do nothing: fake instances do not limit their responses."""

    def cancelled(self, request: Request) -> None:
        """Do nothing: tests post `Cancelled` themselves."""
