"""The kernel's view of one worker that has loaded a model: batches out, responses in.

Implements `kernel.instances.Instance`. A handle lives as long as its worker process; after a restart
there is a new one, so that a late message can never be taken for an answer to a newer request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import mmap
import os
import time
from typing import TYPE_CHECKING

from backends import wire
from backends.reported_metrics import ReportedMetrics
from kernel.errors import ErrorCode, WorkerLost, error_of
from kernel.observe.statistics import ExecutionTimes
from kernel.response import OutputTensor, Response
from shm.region import RegionKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.session import WorkerSession
    from kernel.batch import Batch
    from kernel.busy_poll import LoopPoller
    from kernel.model import Model
    from kernel.request import InputTensor, Request, RequestedOutput
    from shm.region import Held, Region, Span

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
        self._attached: set[int] = set()
        self._arena: memoryview | None = None
        self._freed: list[int] = []
        #: What the model goes on using of inputs whose requests are answered, by request number.
        self._held: dict[int, list[Held]] = {}
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

    # ---- kernel.instances.Instance -----------------------------------------------------------

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
                inputs.append(self._input_ref(tensor, tensor.span))
        outputs: list[wire.OutputRef] = []
        for output in request.outputs:
            if output.span is None:
                outputs.append(wire.OutputRef(output.name, output.classification))
            else:
                outputs.append(self._output_ref(output, output.span))
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

    def _input_ref(self, tensor: InputTensor, span: Span) -> wire.TensorRef:
        region = span.region
        foreign = self._attach(region)
        return wire.TensorRef(
            tensor.name, tensor.datatype, tensor.shape, None, region.number, span.offset, span.byte_size, foreign
        )

    def _output_ref(self, output: RequestedOutput, span: Span) -> wire.OutputRef:
        region = span.region
        self._attach(region)
        return wire.OutputRef(output.name, 0, region.number, span.offset, span.byte_size)

    def _attach(self, region: Region) -> bool:
        """Make the worker know the region; returns whether it is a client's."""
        foreign = region.kind is not RegionKind.ARENA
        if region.number not in self._attached:
            self._attached.add(region.number)
            self._session.send_with_fd(wire.Attach(region.number, region.byte_size, region.offset, foreign), region.fd)
            region.on_closed(self._detach)
        return foreign

    def _detach(self, region: Region) -> None:
        if region.number in self._attached and not self._lost:
            self._attached.discard(region.number)
            self._session.send(wire.Detach(region.number))

    # ---- messages from the worker ------------------------------------------------------------

    def _on_message(self, message: wire.ToKernel) -> None:
        match message:
            case wire.Executed():
                self._executed(message)
            case wire.Responded(request=number, final=final, response=response):
                self._respond(number, response, final)
            case wire.ArenaCreated(byte_size=byte_size):
                self._map_arena(byte_size)
            case wire.InputsHeld(requests=numbers):
                self._hold_inputs(numbers)
            case wire.InputsFreed(requests=numbers):
                self._free_inputs(numbers)
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
            return Response(request.model_name, version, request.id, error=error, final=final)
        blocks: list[int] = []
        passed_on: list[InputTensor] = []
        outputs = []
        for tensor in ref.outputs:
            inline = tensor.data is not None
            outputs.append(
                OutputTensor(tensor.name, tensor.datatype, tensor.shape, tensor.data)
                if inline
                else self._output(request, tensor, blocks, passed_on)
            )
        if passed_on:
            release: Callable[[], None] | None = self._release_later(request, blocks, passed_on, final)
        else:
            release = functools.partial(self._free_blocks, blocks) if blocks else None
        return Response(request.model_name, version, request.id, outputs, ref.parameters, None, final, release)

    def _output(
        self, request: Request, ref: wire.TensorRef, blocks: list[int], passed_on: list[InputTensor]
    ) -> OutputTensor:
        """Return an output that lies in memory, and add its block of the worker's arena to `blocks`, or the input
        that it is a part of to `passed_on`."""
        if ref.region != wire.OUTPUT_ARENA:
            for asked in request.outputs:
                if asked.name == ref.name and asked.shared_memory is not None:
                    return OutputTensor(ref.name, ref.datatype, ref.shape, None, asked.shared_memory)
            data = self._input_part(request, ref, passed_on)
            return OutputTensor(ref.name, ref.datatype, ref.shape, data)
        if self._arena is None or min(ref.offset, ref.byte_size) < 0 or ref.offset + ref.byte_size > len(self._arena):
            raise ValueError(f"an output at {ref.offset}, outside of the worker's arena")
        blocks.append(ref.offset)
        data = self._arena[ref.offset : ref.offset + ref.byte_size]
        return OutputTensor(ref.name, ref.datatype, ref.shape, data)

    def _input_part(self, request: Request, ref: wire.TensorRef, passed_on: list[InputTensor]) -> memoryview | bytes:
        """Return the bytes of an output that is a part of an input."""
        if request.finished:  # the server gave it up, and its inputs back; nobody reads this
            return b""
        arena = self._model.input_arena
        if arena is not None and ref.region == arena.region.number and ref.byte_size >= 0:
            for tensor in request.inputs:
                span = tensor.span
                if span is not None and tensor.shared_memory is None:
                    skip = ref.offset - span.offset
                    if 0 <= skip <= span.byte_size - ref.byte_size:
                        passed_on.append(tensor)
                        return arena.view(ref.offset, ref.byte_size)
        raise ValueError(f"an output at {ref.offset} of region {ref.region}, outside of the request's inputs")

    def _release_later(
        self, request: Request, blocks: list[int], passed_on: list[InputTensor], final: bool
    ) -> Callable[[], None]:
        """Take inputs that are outputs as well from the request; returns what gives them and `blocks` back."""
        if not final:
            raise ValueError("an input as an output of a response that is not the last")
        leases: list[Held] = []
        for tensor in passed_on:
            if tensor.span is not None:  # one input may be several outputs
                leases.append(tensor.span.lease)
                tensor.span = None

        def release() -> None:
            for lease in leases:
                lease.release()
            if blocks:
                self._free_blocks(blocks)

        return release

    def _hold_inputs(self, numbers: list[int]) -> None:
        """Take the blocks of these requests' inputs over, which would be free again with the final answer."""
        first = next(iter(self._batches), 0)  # numbers grow: requests with higher ones were not started
        for number in numbers:
            request = self._requests.get(number)
            if request is None or number in self._held or number > first > 0:
                raise ValueError(f"inputs held of request {number}, which is not being executed")
            held = self._held[number] = []
            for tensor in request.inputs:
                if tensor.span is not None and tensor.shared_memory is None:
                    held.append(tensor.span.lease)
                    tensor.span = None

    def _free_inputs(self, numbers: list[int]) -> None:
        for number in numbers:
            held = self._held.pop(number, None)
            if held is None:
                raise ValueError(f"inputs freed of request {number}, which were not held")
            for lease in held:
                lease.release()

    def _free_blocks(self, offsets: list[int]) -> None:
        """Tell the worker, once per loop turn, which blocks were read."""
        if self._lost:
            return
        if not self._freed:
            asyncio.get_running_loop().call_soon(self._send_freed)
        self._freed += offsets

    def _send_freed(self) -> None:
        offsets, self._freed = self._freed, []
        if offsets and not self._lost:
            self._session.send(wire.FreeBlocks(offsets))

    def _map_arena(self, byte_size: int) -> None:
        fd = self._session.take_fd()
        try:
            if byte_size > os.fstat(fd).st_size:
                raise ValueError(f"an arena of {byte_size} bytes that is smaller")
            self._arena = memoryview(mmap.mmap(fd, byte_size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

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
        self._release_memory()
        self._note_drained()

    def stopped(self) -> None:
        """The worker has ended as it was told to."""
        self._lost = True
        self._poller.moved(-len(self._requests))
        self._model.instances.forget(self)
        self._metrics.end()
        self._release_memory()

    def _release_memory(self) -> None:
        """Give back what only the worker used."""
        self._free_inputs(list(self._held))
        if self._arena is not None:
            # Responses that front doors still hold keep the mapping; it goes with the last of them.
            with contextlib.suppress(BufferError):
                self._arena.release()
            self._arena = None
