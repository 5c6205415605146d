"""The kernel's view of a worker that has loaded a model: sends batches, receives responses.

Implements `kernel.serving.instance.Instance`. A handle lives as long as its worker process. A restarted worker has a
new handle, so a late message is never a response to a newer request.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING

import msgspec

from backends.launch.launcher import ended_by_bus_error
from backends.supervision.batch_stages import Stage, batch_stages, is_harmless, take_suspects, work_marks
from backends.supervision.calls import CallerCalls
from backends.supervision.health_check import WorkerHealthCheck
from backends.supervision.remote_memory import RemoteMemory
from backends.supervision.reported import (
    OF_TIMES,
    ReportedMetrics,
    ReportedStatistics,
    add_traced_tensors,
    end_traces,
    trace_context,
    trace_execution,
)
from backends.supervision.responses import Loss, LostRequest, StreamCredit, worker_response
from backends.supervision.worker_memory import WorkerMemory
from backends.transport import wire
from kernel.errors import ServingError, file_error
from kernel.loop.iteration_end import IterationEnd
from kernel.observe.execution_reports import ExecutionTimes
from kernel.serving.instance import BatchRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from backends.supervision.session import WorkerSession
    from kernel.loop.busy_poll import LoopPoller
    from kernel.serving.batch import Batch
    from kernel.serving.calls import Calls
    from kernel.serving.helper_tasks import RegionAccess
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from shm.blocks import ByteBudget
    from shm.tensor import RequestedOutput, Tensor

#: How long a worker with several batches may finish none before the kernel reads its outbox, in seconds.
OUTBOX_CHECK_S = 0.002

#: How often a request goes back to the scheduler because its worker was lost when it was next: it may be the reason.
_MOST_RETURNS = 3


class WorkerHandle:
    """One model instance in its worker."""

    #: The most responses of a batch that are sent on in one event-loop iteration. Each takes up to 0.1 ms, mostly in
    #: its front door.
    most_at_once = 64

    def __init__(
        self,
        name: str,
        session: WorkerSession,
        model: Model,
        poller: LoopPoller,
        helper: RegionAccess,
        budget: ByteBudget | None = None,
        calls: Calls | None = None,
    ) -> None:
        """`helper` is used only if the worker shares no memory with the kernel, `budget` only if it does.

        `calls` executes the calls of the model; without it the model may make none.
        """
        self.name = name
        self.record = BatchRecord(session.concurrency, overlaps=session.overlaps)
        self._poller = poller
        self._session = session
        self._send = session.send
        self._iteration_end = IterationEnd.current()
        self._model = model
        self._next_number = 1  # of the next request in messages to the worker
        self._requests: dict[int, Request] = {}  # without a final response yet, by their numbers in messages
        self._slow = False  # as `BusyPolling.worker_ends` has returned
        self.memory: WorkerMemory | RemoteMemory
        self._send_execute: Callable[[wire.Execute], None]
        if session.local:
            self.memory, self._send_execute = WorkerMemory(session, name, budget), session.send
        else:
            self.memory = RemoteMemory(session, helper, session.arena_byte_size, self._not_sent)
            self._send_execute = self.memory.send_execute
        self._credit = StreamCredit(session.send)
        self._lost = False
        self._drained: asyncio.Event | None = None  # set when the worker has no request left; None if nothing waits
        self._watched_batch = 0  # the first unfinished batch when the timer for the outbox was set; 0 if it is not set
        self.has_executed = False  # whether the worker has executed a batch
        self._metrics = ReportedMetrics(name, model.statistics.custom)
        self.health: WorkerHealthCheck | None = None  # of a model with a health check
        if session.checks_health:
            self.health = WorkerHealthCheck(name, session.send, lambda: bool(self.record.batches))
            model.health.add(name, self.health)
        self._reports = ReportedStatistics(name, model.statistics, session.pid)
        self._calls = calls
        self.worker_calls: CallerCalls | None = None  # from the model's first call of another model on
        session.take_messages(self._handlers())

    def keep_pages(self, byte_size: int) -> None:
        """Keep the pages of the first `byte_size` bytes of each arena that the worker gets, so that it may pin them.

        To be called before the first batch; 0 keeps none.
        """
        if isinstance(self.memory, WorkerMemory):
            self.memory.steady_byte_size = byte_size

    # ---- kernel.serving.instance.Instance ----------------------------------------------------

    def execute(self, batch: Batch) -> None:
        number = batch.first_request_number = self._next_number
        messages: list[wire.RequestMessage] = []
        in_flight = 0
        tensors_traced = False
        for request in batch.entries:
            if request is None:
                messages.append(wire.RequestMessage(number, []))
            else:
                if not self._requests:
                    polling = self._poller.polling
                    polling.busy_workers += 1
                    polling.slow_workers += self._slow
                self._requests[number] = request
                in_flight += 1
                if request.leased and (error := self._attach(request)) is not None:
                    self._not_sent(batch.number, number, error)
                    if batch.slots is not None:
                        messages.append(wire.RequestMessage(number, []))
                    number += 1
                    continue
                messages.append(
                    wire.RequestMessage(
                        number,
                        request.inputs,
                        request.outputs,
                        request.id,
                        request.sequence_start | request.sequence_end << 1,
                        request.correlation_id,
                        request.priority,
                        request.timeout_us,
                        request.parameters,
                    )
                )
                trace = request.trace
                if trace is not None:
                    batch.traced = True
                    if trace.usual and trace.batch is None:
                        trace.batch = batch
                        messages[-1].trace = OF_TIMES
                    else:
                        trace.begin_execution(batch)
                        messages[-1].trace = context = trace_context(trace)
                        tensors_traced = tensors_traced or context.tensors
            number += 1
        self._next_number = number
        if batch.slots is not None:
            for message, entry, slot in zip(messages, batch.entries, batch.slots, strict=True):
                message.sequence = wire.SequenceEntry(slot, entry is None)
        poller = self._poller
        poller.moved(in_flight)
        self._send_execute(wire.Execute(batch.number, messages, poller.polling.worker_ns, tensors_traced))
        if not self._watched_batch and len(self.record.batches) > self.record.concurrency:
            self._schedule_outbox_check()

    def _attach(self, request: Request) -> ServingError | None:
        """Announce the regions of a request to the worker, which uses them until its final response.

        Returns the error of the request: no descriptor is left, or memory of a device is gone.
        """
        request.in_use = True
        arena = self._model.input_arena
        # What is executed again must find its inputs unchanged: then the model gets private pages.
        own_region = None if arena is None or self._model.poison is not None else arena.region
        attached, attach = self.memory.attached, self.memory.attach
        try:
            places: list[Tensor | RequestedOutput] = [*request.inputs, *request.outputs]
            for place in places:
                if place.span is not None:
                    region = place.span.lease.region
                    if region.number not in attached:
                        attach(region, writable=region.of_client or region is own_region)
        except OSError as error:
            return file_error(f"a tensor could not be given to the worker of '{self.name}': {error}", error)
        except ServingError as error:
            return error
        return None

    def _schedule_outbox_check(self) -> None:
        """Check the outbox later: a busy worker may have unsent responses of an earlier batch in it."""
        self._watched_batch = next(iter(self.record.batches))
        asyncio.get_running_loop().call_later(OUTBOX_CHECK_S, self._check_outbox)

    def _check_outbox(self) -> None:
        batches = self.record.batches
        if next(iter(batches), 0) == self._watched_batch and not self._lost:
            self._session.take_unsent()
        self._watched_batch = 0
        if len(batches) > self.record.concurrency:
            self._schedule_outbox_check()

    def cancel(self, request: Request) -> None:
        number = self._number_of(request)
        if number is not None and not self._lost:
            self._send(wire.Cancel([number]))
            if self.worker_calls is not None:
                self.worker_calls.parent_cancelled()
                ahead = self.record.unstarted() if self.record.concurrency == 1 else ()
                if any(request in batch.requests for batch in ahead):
                    self._send(wire.Recall())  # it may wait behind a call that waits for it

    def consumed(self, request: Request, count: int) -> None:
        number = self._number_of(request)
        if number is not None and not self._lost:
            self._credit.consumed(number, count)

    def send_now(self) -> None:
        self._session.flush()

    def end_sequence(self, slot: int) -> None:
        if not self._lost:
            self._send(wire.EndSequence(slot))

    def work_marks(self) -> list[Hashable]:
        """Return what the worker has begun and not finished, see `backends.supervision.batch_stages`."""
        return work_marks(
            self.record,
            self._requests,
            self._credit.granted,
            self._session.progress(),
            decoupled=self._model.spec.decoupled,
        )

    def blocked_requests(self) -> dict[Request, Hashable]:
        """Return the requests whose clients keep the worker waiting, with marks: see `StreamCredit.blocked`."""
        return self._credit.blocked(self._requests)

    def _number_of(self, request: Request) -> int | None:
        """Return the number of a request in messages, or None if the worker has sent its final response."""
        # A search is fast enough: only streams and cancelled requests need it, and a worker has few requests.
        return next((number for number, each in self._requests.items() if each is request), None)

    # ---- messages from the worker ------------------------------------------------------------

    def _handlers(self) -> wire.Handlers:
        """Return what handles each message of this worker. A message that is not in it ends the worker."""
        memory = self.memory
        handlers: wire.Handlers = {
            wire.Executed: self._executed,
            wire.Responded: self._responded,
            wire.Rescheduled: lambda message: self._rescheduled(message.request),
            wire.Started: lambda message: self._started(message.batch),
            wire.TensorsTraced: lambda message: add_traced_tensors(
                self._requests.get(message.request), message.tensors
            ),
            wire.Transfer: lambda message: memory.begin_transfer(message.number, message.byte_size),
            wire.Chunk: lambda message: memory.add_chunk(message.number, message.offset, message.data),
            wire.ArenaCreated: lambda message: memory.take_output_arena(message.byte_size),
            wire.DeviceArenaCreated: memory.take_device_arena,
            wire.InputsHeld: lambda message: self._hold_inputs(message.requests),
            wire.InputsFreed: lambda message: memory.free_held(message.requests),
            wire.MetricsChanged: lambda message: self._metrics.take(message, time.monotonic_ns()),
            wire.Reported: self._reported,
            wire.MemoryUsed: self._reports.take_memory,
            wire.Recalled: lambda message: self._recalled(message.batches),
        }
        if (health := self.health) is not None:
            handlers[wire.HealthChecked] = lambda message: health.responded(message.check, message.problem)
        if self._calls is not None:
            handlers |= {
                wire.Submit: lambda message: self._made_calls().submit(message),
                wire.CancelCall: lambda message: self._made_calls().cancel(message.call),
                wire.CallConsumed: lambda message: self._made_calls().consumed(message.call, message.count),
                wire.Released: lambda message: self._made_calls().released(message.leases),
            }
        return handlers

    def _responded(self, message: wire.Responded) -> None:
        self._respond(message.request, message.response, message.final)
        if not message.final:
            self._session.watch_outbox()
        elif self._reports.open:
            self._reports.open.pop(message.request, None)

    def _started(self, number: int) -> None:
        try:
            self.record.started(number)
        except KeyError:
            raise ValueError(f"batch {number} was not dispatched to this worker") from None

    def _executed(self, message: wire.Executed) -> None:
        start_ns, end_ns = message.compute_start_ns, message.compute_end_ns
        if not start_ns <= message.input_end_ns <= message.output_start_ns <= end_ns:
            raise ValueError("times of an execution that are not in order")
        offset = self._session.clock_offset_ns
        times = ExecutionTimes(
            start_ns + offset, message.input_end_ns + offset, message.output_start_ns + offset, end_ns + offset
        )
        if len(message.responses) > self.most_at_once:
            self._session.handle_in_pieces(self._executed_in_pieces(message, times))
            return
        try:
            batch = self.record.executed(message.batch)
        except KeyError:
            raise ValueError(f"batch {message.batch} is not being executed") from None
        if batch.traced and batch.times is None:
            batch.times = times
            if batch.notifies_traces:
                trace_execution(batch, times, self.name, message)
        if message.responses:
            numbers = batch.request_numbers()
            if len(message.responses) != len(numbers):
                raise ValueError(f"{len(message.responses)} responses for a batch of {len(numbers)} requests")
            if len(numbers) > 1:
                self._iteration_end.joins_writes = True
            for number, response in zip(numbers, message.responses, strict=True):
                self._respond(number, response, True)
        self.has_executed = True
        if self._reports.pending:
            batch.reports = self._reports.of_batch(batch)
        if message.copies:
            self._model.statistics.copied_tensors += message.copies
            self._model.statistics.copied_byte_size += message.copied_byte_size
        if not message.responses and self._requests:
            self._reports.counted(batch, times, time.monotonic_ns(), self._requests)
        self._model.instances.executed(self, batch, times)

    def _executed_in_pieces(self, message: wire.Executed, times: ExecutionTimes) -> Iterator[None]:
        """Handle an `Executed` with many responses, some of them with each `next`.

        It counts as if they had come before it, as `Responded`: the batch ends with the last one, and the next one
        that is not dispatched yet begins then.
        """
        number = message.batch
        try:
            batch = self.record.executing(number)
        except KeyError:
            raise ValueError(f"batch {number} is not being executed") from None
        if batch.traced:
            batch.times = times
            if batch.notifies_traces:
                trace_execution(batch, times, self.name, message)
        try:
            numbers, responses, most = batch.request_numbers(), message.responses, self.most_at_once
            if len(responses) != len(numbers):
                raise ValueError(f"{len(responses)} responses for a batch of {len(numbers)} requests")
            for start in range(0, len(numbers), most):
                self._iteration_end.joins_writes = True
                some = slice(start, start + most)
                for each, response in zip(numbers[some], responses[some], strict=True):
                    self._respond(each, response, True)
                yield
        except ValueError:
            self.record.executed(number)
            raise
        self._executed(msgspec.structs.replace(message, responses=[]))
        self._check_drained()

    def _reported(self, message: wire.Reported) -> None:
        """Count what the backend reports, and add activities to the traces of their requests."""
        offset_ns = self._session.clock_offset_ns
        self._reports.take(message, self._requests, self.record.batches, offset_ns)
        for activity in message.activities:
            request = self._requests.get(activity.request)
            if request is not None and request.trace is not None:
                request.trace.stamp(activity.name, activity.ns + offset_ns)

    def _respond(self, number: int, message: wire.ResponseMessage | None, final: bool) -> None:
        request = self._requests.get(number)
        if request is None:
            raise ValueError(f"a response for request {number}, which is not being executed")
        # Raises ValueError for a message that breaks the protocol.
        response = worker_response(request, message, self._model.version_text, self.memory, final=final)
        self._poller.moved(-1 if final else 0)
        if final:
            del self._requests[number]
            if not self._requests:
                self._idle()
            if self.worker_calls is not None:
                self.worker_calls.parent_ended(request)
            if self._credit.unsent:
                self._credit.forget(number)
            if request.in_use:
                self.memory.finished(number)
                request.in_use = False
                if request.finished:
                    request.release_leases()
        if request.finished:  # the server abandoned the request at its exit and responded itself
            response.release()
        elif self.memory.defers:
            self.memory.deliver(request, response)
        else:
            request.respond(response)

    def _rescheduled(self, number: int) -> None:
        """The model gives a request back that it has executed, to execute it again."""
        request = self._requests.get(number)
        batch = next((b for b in self.record.batches.values() if number in b.request_numbers()), None)
        if request is None or batch is None:
            raise ValueError(f"request {number} was rescheduled, which is not being executed")
        self._credit.forget(number)
        batch.reschedule(request)
        if request.trace is not None:
            request.trace.not_executed()
        if request.in_use:
            self.memory.finished(number)
        self._taken_back(number)
        if not request.finished:
            self._model.instances.rescheduled(request)

    def _idle(self) -> None:
        """The worker has no request any more."""
        self._slow = self._poller.polling.worker_ends(self._model.instances.mean_execution_ns(), slow=self._slow)

    def _not_sent(self, batch_number: int, number: int, error: ServingError) -> None:
        """Fail a request that could not be sent to the worker; the other requests of its batch continue."""
        request = self._taken_back(number)
        self.record.batches[batch_number].remove(request)
        if request.trace is not None:
            request.trace.not_executed()
        if not request.finished:
            request.fail(error)

    def _taken_back(self, number: int) -> Request:
        """Return a request that leaves the worker without a response. One that has ended releases what it leases."""
        request = self._requests.pop(number)
        if not self._requests:
            self._idle()
        self._poller.moved(-1)
        request.in_use = False
        if request.finished:  # the server abandoned it at its exit
            request.release_leases()
        return request

    def _hold_inputs(self, numbers: list[int]) -> None:
        """The model holds inputs of these requests, whose final responses follow."""
        unstarted = {number for batch in self.record.unstarted() for number in batch.request_numbers()}
        for number in numbers:
            request = self._requests.get(number)
            if request is None or number in unstarted:
                raise ValueError(f"held inputs of request {number}, which is not being executed")
            self.memory.hold(number, request)

    # ---- calls of other models ---------------------------------------------------------------

    def _made_calls(self) -> CallerCalls:
        """Return the calls of the model, which makes its first one perhaps."""
        calls = self.worker_calls
        if calls is None:
            assert self._calls is not None, "a call of a model that may make none"
            # The model calls others: it gets fewer batches ahead of time, and those that it has come back.
            self._model.instances.note_calls()
            if self.record.concurrency == 1 and self.record.unstarted():
                self._send(wire.Recall())
            calls = self.worker_calls = CallerCalls(
                self, self._calls, self.memory, self._session, lambda: self._requests, self._session.arena_byte_size,
                self._model.spec.namespace,
            )  # fmt: skip
        return calls

    def _recalled(self, numbers: list[int]) -> None:
        """The worker returns batches that it has not begun. Raises ValueError for others."""
        returned: list[Request] = []
        unstarted = {batch.number for batch in self.record.unstarted()}
        for number in numbers:
            if number not in unstarted or self.record.concurrency > 1:
                raise ValueError(f"batch {number} was returned, which was not dispatched ahead of time")
            batch = self.record.batches.pop(number)
            for request_number in batch.request_numbers():
                if request_number in self._requests:
                    request = self._taken_back(request_number)
                    if not request.finished:
                        returned.append(request)
        self._model.instances.recalled(self, returned)
        for request in returned:
            if self.worker_calls is not None:
                self.worker_calls.requeued(request)

    # ---- the end -----------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until the worker has no request left, or is lost. The instance must be set apart."""
        if self._requests or self.record.batches:
            self._drained = asyncio.Event()
            self._session.take_messages(
                {
                    kind: functools.partial(self._handle_while_draining, handler)
                    for kind, handler in self._handlers().items()
                }
            )
            await self._drained.wait()

    async def released(self) -> None:
        """Wait until no block of the worker on a device is leased, or the worker is lost."""
        await self.memory.released()

    def _handle_while_draining(self, handler: Callable[..., None], message: wire.ToKernel) -> None:
        """Handle a message while `drain` waits."""
        handler(message)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._drained is not None and not self._requests and not self.record.batches:
            self._drained.set()

    def lost(self, cause: str, error: ServingError | None = None) -> None:
        """The worker is gone: the scheduler gets the requests back that it had not begun.

        The others fail with `error`, or with the cause and how far it was; of a large batch some fail at a time."""
        self._end()
        # Before any request fails: its sink may submit another one, which must not come here.
        self._model.instances.forget(self)
        if self.worker_calls is not None:
            self.worker_calls.close()
        if ended_by_bus_error(cause):
            self.memory.report_fault(self._requests.values())
        has_called = (lambda _: False) if self.worker_calls is None else self.worker_calls.has_called
        spec = self._model.spec
        repeats = error is None and self._session.unreachable and spec.retries_on_worker_loss and not spec.decoupled
        returned: list[Request] = []
        stages: dict[int, Stage] = {}
        session = self._session
        unfinished = batch_stages(
            self.record, session.progress(), self.memory.last_sent, unreachable=session.unreachable
        )
        for position, (batch, stage) in enumerate(unfinished):
            for number in batch.request_numbers():
                stages[number] = stage
                request = self._requests.get(number)
                if request is None:
                    continue
                untouched = stage is Stage.UNTOUCHED
                if not untouched and not (repeats and is_harmless(request, batch, has_called)):
                    continue
                if self._may_return(request, position if untouched else 0):
                    del self._requests[number]
                    request.in_use = False
                    returned.append(request)
        if self._model.poison is not None and error is None:
            returned[:0] = take_suspects(self._model.poison, unfinished, self._requests, has_called)
        for batch, _ in unfinished:
            end_traces(batch)
        requests, self._requests = self._requests, {}
        self.record.batches.clear()
        loss = Loss(self.name, cause, error)
        self._model.give_up(
            *(LostRequest(each, loss, stages.get(number, Stage.IN_MODEL)) for number, each in requests.items())
        )
        self._model.instances.lost(self, returned)
        self._check_drained()

    def _may_return(self, request: Request, position: int) -> bool:
        """Whether the scheduler gets a request back that the worker had at `position` of its batches."""
        if request.cancelled or request not in self._model.live.instance_of:
            return False  # its client has disconnected; or it was abandoned, or belongs to a warm-up
        if not position:
            request.lost_before_start += 1
        return request.lost_before_start <= _MOST_RETURNS

    def stopped(self) -> None:
        """The worker has ended as it was asked to."""
        self._end()
        requests, self._requests = self._requests, {}
        for request in requests.values():  # abandoned when the server had to exit
            request.in_use = False
            request.release_leases()
        self._model.instances.forget(self)
        if self.worker_calls is not None:
            self.worker_calls.close()

    def _end(self) -> None:
        """The worker is gone: release its memory and metrics."""
        self._lost = True
        self.memory.close()
        if self._requests:
            self._idle()
        self._poller.moved(-len(self._requests))
        self._metrics.end()
        if self.health is not None:
            self._model.health.remove(self.name, self.health)
            self.health.end()
        self._reports.end()
