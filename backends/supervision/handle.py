"""The kernel's view of one worker that has loaded a model: batches out, responses in.

Implements `kernel.serving.instances.Instance`. A handle lives as long as its worker process; after a restart
there is a new one, so that a late message can never be taken for an answer to a newer request.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

from backends.supervision.reported_metrics import ReportedMetrics
from backends.supervision.worker_memory import OutputMemory, WorkerMemory
from backends.transport import wire
from kernel.errors import ErrorCode, WorkerLost, error_of, request_prefix
from kernel.observe.statistics import ExecutionTimes
from kernel.serving.response import OutputTensor, Response

if TYPE_CHECKING:
    from backends.supervision.session import WorkerSession
    from kernel.loop.busy_poll import LoopPoller
    from kernel.serving.batch import Batch
    from kernel.serving.model import Model
    from kernel.serving.request import Request

#: How long a worker that was given several batches may be silent until the kernel looks for answers that it keeps.
_SILENCE_S = 0.002

#: Credit is given back in portions, so that a stream does not cost a message per response.
_CREDIT_PORTION = wire.CREDIT_WINDOW // 4


class WorkerHandle:
    """One model instance in its worker."""

    def __init__(self, name: str, session: WorkerSession, model: Model, poller: LoopPoller) -> None:
        self.name = name
        self._poller = poller
        self._session = session
        self._model = model
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}
        #: Batches that the worker has not finished, by their numbers, with the numbers of their requests.
        self._batches: dict[int, list[int]] = {}
        self._memory = WorkerMemory(session, model)
        self._owed_credit: dict[int, int] = {}
        self._lost = False
        #: Set when the worker has nothing left to do; None while nobody waits for that.
        self._drained: asyncio.Event | None = None
        #: The first batch when the timer that looks for kept answers was set; 0 where it is not set.
        self._watched_batch = 0
        #: Whether the worker has completed a batch since it was started.
        self.has_executed = False
        self._metrics = ReportedMetrics(name, model.statistics.custom)
        session.on_message = self._on_message

    # ---- kernel.serving.instances.Instance -----------------------------------------------------------

    def execute(self, batch: Batch) -> None:
        refs: list[wire.RequestRef] = []
        numbers: list[int] = []
        for request in batch.requests:
            request.number = number = next(self._numbers)
            self._requests[number] = request
            numbers.append(number)
            refs.append(self._request_ref(request, number))
        batch_number = next(self._numbers)
        self._batches[batch_number] = numbers
        poller = self._poller
        poller.moved(len(numbers))
        self._session.send(wire.Execute(batch_number, refs, poller.polling.worker_ns))
        if len(self._batches) > 1 and not self._watched_batch:
            self._watch()

    def _watch(self) -> None:
        """Look later whether the worker keeps an answer while it is busy with the next batch."""
        self._watched_batch = next(iter(self._batches))
        asyncio.get_running_loop().call_later(_SILENCE_S, self._look)

    def _look(self) -> None:
        first = next(iter(self._batches), 0)
        if first == self._watched_batch and not self._lost:
            self._session.take_unsent()
        self._watched_batch = 0
        if len(self._batches) > 1:
            self._watch()

    def cancel(self, request: Request) -> None:
        if request.number in self._requests and not self._lost:
            self._session.send(wire.Cancel([request.number]))

    def consumed(self, request: Request, count: int) -> None:
        number = request.number
        if number not in self._requests or self._lost:
            return
        owed = self._owed_credit.get(number, 0) + count
        if owed >= _CREDIT_PORTION:
            self._session.send(wire.Credit(number, owed))
            owed = 0
        self._owed_credit[number] = owed

    # ---- requests to the worker --------------------------------------------------------------

    def _request_ref(self, request: Request, number: int) -> wire.RequestRef:
        inputs: list[wire.TensorRef] = []
        for tensor in request.inputs:
            if tensor.span is None:
                assert tensor.data is not None
                inputs.append(wire.TensorRef(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)))
            else:
                inputs.append(self._memory.input_ref(tensor, tensor.span))
        outputs: list[wire.OutputRef] = []
        for output in request.outputs:
            if output.span is None:
                outputs.append(wire.OutputRef(output.name, output.classification))
            else:
                outputs.append(self._memory.output_ref(output, output.span))
        return wire.RequestRef(
            number,
            inputs,
            outputs,
            request.id,
            int(request.sequence_start) | int(request.sequence_end) << 1,
            request.correlation_id,
            request.priority,
            request.timeout_us,
            request.parameters,
        )

    # ---- messages from the worker ------------------------------------------------------------

    def _on_message(self, message: wire.ToKernel) -> None:
        match message:
            case wire.Executed():
                self._executed(message)
            case wire.Responded(request=number, final=final, response=response):
                self._respond(number, response, final)
            case wire.ArenaCreated(byte_size=byte_size):
                self._memory.map_arena(byte_size)
            case wire.InputsHeld(requests=numbers):
                self._hold_inputs(numbers)
            case wire.InputsFreed(requests=numbers):
                self._memory.free_held(numbers)
            case wire.MetricsChanged():
                self._metrics.take(message, time.monotonic_ns())

    def _executed(self, message: wire.Executed) -> None:
        if message.batch != next(iter(self._batches), None):
            raise ValueError(f"batch {message.batch} is not being executed")
        numbers = self._batches[message.batch]
        if message.responses and len(message.responses) != len(numbers):
            raise ValueError(f"{len(message.responses)} responses for a batch of {len(numbers)} requests")
        del self._batches[message.batch]
        self.has_executed = True
        for number, response in zip(numbers, message.responses, strict=False):
            self._respond(number, response, True)
        times = ExecutionTimes(message.input_ns, message.infer_ns, message.output_ns)
        self._model.instances.executed(self, times)

    def _respond(self, number: int, ref: wire.ResponseRef | None, final: bool) -> None:
        request = self._requests.get(number)
        if request is None:
            raise ValueError(f"a response for request {number}, which is not being executed")
        response = self._response(request, ref, final)  # raises for what no worker of ours sends
        self._poller.moved(-1 if final else 0)
        if final:
            del self._requests[number]
            if self._owed_credit:
                self._owed_credit.pop(number, None)
        if request.finished:  # the server gave the request up, and answered it, when it had to exit
            response.release()
            return
        request.respond(response)

    def _response(self, request: Request, ref: wire.ResponseRef | None, final: bool) -> Response:
        version = self._model.version_text
        if ref is None:
            return Response(request.model_name, version, request.id, final=final)
        if ref.error_code:
            error = error_of(ErrorCode(ref.error_code), ref.error_text)
            # The only place that reads this out of a text: the wire has no field for it.
            error.before_queueing = ref.error_text.startswith(request_prefix(request.id))
            return Response(request.model_name, version, request.id, error=error, final=final)
        outputs: list[OutputTensor] = []
        used: OutputMemory | None = None
        for tensor in ref.outputs:
            if tensor.data is not None:
                outputs.append(OutputTensor(tensor.name, tensor.datatype, tensor.shape, tensor.data))
            else:
                used = used or OutputMemory()
                outputs.append(self._memory.output(request, tensor, used))
        release = used.release_with(self._memory, final=final) if used is not None else None
        return Response(request.model_name, version, request.id, outputs, ref.parameters, None, final, release)

    def _hold_inputs(self, numbers: list[int]) -> None:
        """The model keeps inputs of these requests, whose final answers come next."""
        first = next(iter(self._batches), 0)  # numbers grow: requests with higher ones were not started
        for number in numbers:
            request = self._requests.get(number)
            if request is None or number > first > 0:
                raise ValueError(f"inputs held of request {number}, which is not being executed")
            self._memory.hold(number, request)

    # ---- the end -----------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until the worker has nothing left to do, or is lost. It must be apart from its model's others."""
        if self._requests or self._batches:
            self._drained = asyncio.Event()
            self._session.on_message = self._on_last_message
            await self._drained.wait()

    def _on_last_message(self, message: wire.ToKernel) -> None:
        """Handle a message while somebody waits for the last one: who does not wait, does not ask."""
        self._on_message(message)
        self._note_drained()

    def _note_drained(self) -> None:
        if self._drained is not None and not self._requests and not self._batches:
            self._drained.set()

    def lost(self, cause: str) -> None:
        """The worker is gone: whatever it was executing is answered with the cause.

        A worker answers a batch before it starts the next: only the first of those that it had was, or
        may have been, started.
        """
        self._lost = True
        self._memory.close()
        self._poller.moved(-len(self._requests))
        later = itertools.islice(self._batches.values(), 1, None)
        # One that was answered out of turn, which no worker of ours does, is not there any more.
        unstarted = [self._requests.pop(number) for numbers in later for number in numbers if number in self._requests]
        requests, self._requests = self._requests, {}
        self._batches.clear()
        for request in requests.values():
            request.fail(WorkerLost(self.name, cause))
        self._model.instances.lost(self, unstarted)
        self._metrics.end()
        self._note_drained()

    def stopped(self) -> None:
        """The worker has ended as it was told to."""
        self._lost = True
        self._memory.close()
        self._poller.moved(-len(self._requests))
        self._model.instances.forget(self)
        self._metrics.end()
