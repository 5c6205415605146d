"""Tensors of a worker that shares no memory with the kernel: they are sent over the connection, in both directions.

Small tensors are in the message of their request or response (`wire.SENT_INLINE_BYTE_SIZE`), others are sent before it
in chunks.

Has the interface of `backends/supervision/worker_memory.py`. The helper reads and writes client regions, so a batch may
wait before it is sent, and a response before its client gets it. Both keep their order.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from backends.transport import wire
from kernel.background import BackgroundTasks
from kernel.errors import InternalError, ServingError, failing_as
from kernel.machine import keep_freed_memory
from kernel.observe.limited_log import LimitedLog
from shm.arena import INLINE_LIMIT
from shm.lease import RegionNumber
from shm.region import CudaIpcHandle, new_region_number
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Mapping, Sequence

    from backends.supervision.session import WorkerSession
    from kernel.serving.helper_tasks import RegionAccess
    from kernel.serving.request import Request
    from kernel.serving.response import Response
    from shm.region import Region
    from shm.tensor import Buffer

_failures = LimitedLog(logging.getLogger(__name__))

#: While the connection has more unsent bytes than this, no more chunks are sent.
MAX_UNSENT_BYTE_SIZE = 1 << 20


class _Result(msgspec.Struct):
    """A response to a call of another model that waits to be sent."""

    call: int
    response: Response
    deliver: Callable[[int, Response], None]


def _is_large(tensor: Tensor) -> bool:
    """Whether a tensor is sent in chunks, before the message that names it."""
    return tensor.byte_size > INLINE_LIMIT or tensor.data is None


def _not_written(error: Exception) -> ServingError:
    _failures.log("the server", "outputs could not be written to a client's region", exc_info=error)
    return InternalError("the outputs could not be written")


def _with_small_tensors(requests: list[wire.RequestMessage]) -> list[wire.RequestMessage] | None:
    """Return the requests of a batch with the bytes of all inputs; None if an input is sent separately."""
    found: list[wire.RequestMessage] = []
    room = wire.CHUNK_BYTE_SIZE  # of the whole batch
    for request in requests:
        spans = [tensor.span for tensor in request.inputs if tensor.span is not None]
        byte_size = sum(span.byte_size for span in spans)
        room -= byte_size
        if byte_size > wire.SENT_INLINE_BYTE_SIZE or room < 0 or any(map(_is_read_by_helper, spans)):
            return None
        if spans:
            request = msgspec.structs.replace(request, inputs=[_with_bytes(each) for each in request.inputs])
        found.append(request)
    return found


def _with_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor with its bytes, which are copied when the message is made."""
    span = tensor.span
    if span is None:
        return tensor
    data = span.lease.region.view(span.offset, span.byte_size)
    return Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _is_read_by_helper(span: Span) -> bool:
    """Whether the helper reads the bytes: they are a client's, or on a device."""
    region = span.lease.region
    return region.of_client or isinstance(region.handle, CudaIpcHandle)


class RemoteMemory:
    """Copies tensors to and from one worker. Every `ValueError` is for a message that breaks the protocol."""

    #: Responses go through `deliver`.
    defers = True

    #: Memory of devices is opened on the machine where it is, by processes that share memory.
    opens_devices = False

    def __init__(self, session: WorkerSession, helper: RegionAccess, byte_size_limit: int,
                 not_sent: Callable[[int, int, ServingError], None]) -> None:  # fmt: skip
        """`not_sent` is called with a batch number, a request number and the error if a region cannot be read.

        `byte_size_limit` limits the bytes of outputs that a worker has sent and no response has named.
        """
        keep_freed_memory()
        self._session = session
        self._helper = helper
        self._byte_size_limit = byte_size_limit
        self._not_sent = not_sent
        #: Batches and results of calls that wait to be sent, oldest first, and the task that sends them.
        self._batches: deque[wire.Execute | _Result] = deque()
        self._tasks = BackgroundTasks()
        self._sending: asyncio.Task[None] | None = None
        #: Numbers of the regions that were sent for a request, by request number.
        self._sent: dict[int, list[int]] = {}
        #: Outputs that the worker is sending or has sent, and that no response has named yet, by region number.
        self._outputs: dict[int, bytearray] = {}
        #: Responses whose outputs are not written yet, oldest first.
        self._responses: deque[tuple[Request, Response]] = deque()
        self._delivering: asyncio.Task[None] | None = None
        self._closed = False
        #: The number of the last batch that was sent.
        self.last_sent = 0
        #: No region is attached, see `attach`.
        self.attached: frozenset[int] = frozenset()

    # ---- to the worker -----------------------------------------------------------------------

    def attach(self, region: Region, *, writable: bool) -> None:
        """Do nothing: the bytes of regions are sent with each batch."""

    def send_execute(self, message: wire.Execute) -> None:
        """Send a batch after earlier ones, with its tensors."""
        if self._sending is None and (requests := _with_small_tensors(message.requests)) is not None:
            self._send_batch(message, requests)
            return
        self._batches.append(message)
        self._send_soon()

    def _send_batch(self, message: wire.Execute, requests: list[wire.RequestMessage]) -> None:
        self._session.send(wire.Execute(message.batch, requests, message.poll_ns))
        self.last_sent = message.batch

    def _send_soon(self) -> None:
        if self._sending is None:
            self._sending = self._tasks.start(self._send_batches())

    async def _send_batches(self) -> None:
        try:
            while self._batches and not self._closed:
                message = self._batches.popleft()
                if isinstance(message, _Result):
                    await self._send_result(message)
                    continue
                requests: list[wire.RequestMessage] = []
                for request in message.requests:
                    try:
                        requests.append(await self._with_sent_tensors(request))
                    except ServingError as error:
                        self.finished(request.number)
                        self._not_sent(message.batch, request.number, error)
                self._send_batch(message, requests)
        finally:
            self._sending = None

    async def _with_sent_tensors(self, request: wire.RequestMessage) -> wire.RequestMessage:
        """Send the tensors that are in shared memory; return the request with their spans at the worker."""
        if all(tensor.span is None for tensor in request.inputs):
            return request
        inputs: list[Tensor] = []
        for tensor in request.inputs:
            if tensor.span is None:
                inputs.append(tensor)
            else:
                span = await self._send_span(request.number, tensor.span)
                inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, None, span))
        return msgspec.structs.replace(request, inputs=inputs)

    async def _send_span(self, request: int, span: Span) -> Span:
        copy: Span | None = None
        if _is_read_by_helper(span):
            span = copy = await self._helper.read(span)
        try:
            number = new_region_number()
            self._sent.setdefault(request, []).append(number)
            await self._send_bytes(number, span.lease.region.view(span.offset, span.byte_size))
        finally:
            if copy is not None:
                copy.lease.release()
        return Span(RegionNumber(number), 0, span.byte_size)

    async def _send_bytes(self, number: int, data: Buffer) -> None:
        self._session.send(wire.Transfer(number, len(data)))
        for start in range(0, len(data), wire.CHUNK_BYTE_SIZE):
            self._session.send(wire.Chunk(number, start, data[start : start + wire.CHUNK_BYTE_SIZE]))
            await self._session.written(MAX_UNSENT_BYTE_SIZE)

    # ---- calls of other models ---------------------------------------------------------------

    def deliver_result(self, call: int, response: Response, deliver: Callable[[int, Response], None]) -> None:
        """Send the outputs of a response to a call, after what is being sent, and then `deliver` it."""
        if self._closed:
            response.release()
        elif self._sending is None and not any(_is_large(tensor) for tensor in response.outputs or ()):
            deliver(call, response)
        else:
            self._batches.append(_Result(call, response, deliver))
            self._send_soon()

    async def _send_result(self, result: _Result) -> None:
        response, numbers = result.response, list[int]()
        outputs: list[Tensor] = []
        try:
            for tensor in response.outputs or ():
                if not _is_large(tensor):
                    outputs.append(tensor)
                    continue
                number = new_region_number()
                numbers.append(number)
                await self._send_bytes(number, tensor.raw())
                span = Span(RegionNumber(number), 0, tensor.byte_size)
                outputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, None, span))
        finally:
            response.release()
        if response.outputs is not None:
            response.outputs = outputs
        result.deliver(result.call, response)
        for number in numbers:
            self._session.send(wire.Detach(number))

    def take_call_input(
        self, tensor: Tensor, span: Span, requests: Mapping[int, Request], results: Mapping[int, Tensor]
    ) -> None:
        """Put the bytes of an input of a call, which the worker sent as `span`, into the tensor. Raises ValueError."""
        self._take_sent(tensor, span)

    def finished(self, request: int) -> None:
        """The worker has finished a request: free its copies of the inputs."""
        for number in self._sent.pop(request, ()):
            self._session.send(wire.Detach(number))

    # ---- from the worker ---------------------------------------------------------------------

    def begin_transfer(self, number: int, byte_size: int) -> None:
        """The worker starts to send an output. Raises ValueError."""
        unnamed_byte_size = sum(map(len, self._outputs.values()))
        if number in self._outputs or byte_size < 0 or unnamed_byte_size + byte_size > self._byte_size_limit:
            raise ValueError(f"a transfer of {byte_size} bytes as region {number}")
        self._outputs[number] = bytearray(byte_size)

    def add_chunk(self, number: int, offset: int, data: Buffer) -> None:
        """Store received bytes of an output. Raises ValueError."""
        memory = self._outputs.get(number)
        if memory is None or not 0 <= offset <= len(memory) - len(data):
            raise ValueError(f"{len(data)} bytes at {offset} of region {number}")
        memory[offset : offset + len(data)] = data

    def take_output(self, request: Request, tensor: Tensor, span: Span, *, final: bool) -> None:
        """Put the bytes of an output, which the worker sent as `span`, into the tensor. Raises ValueError."""
        self._take_sent(tensor, span)

    def _take_sent(self, tensor: Tensor, span: Span) -> None:
        memory = self._outputs.pop(span.lease.region_number, None)
        if memory is None or span.offset or span.byte_size != len(memory):
            raise ValueError(f"tensor '{tensor.name}' in region {span.lease.region_number}, which was not sent")
        tensor.data, tensor.span = memoryview(memory), None

    def deliver(self, request: Request, response: Response) -> None:
        """Send `response` after its outputs are written to the client's regions that the request named for them."""
        if self._delivering is None and not any(asked.span is not None for asked in request.outputs):
            request.respond(response)
            return
        self._responses.append((request, response))
        if self._delivering is None:
            self._delivering = self._tasks.start(self._deliver_all())

    async def _deliver_all(self) -> None:
        try:
            while self._responses:
                request, response = self._responses.popleft()
                try:
                    with failing_as(_not_written, passes=ServingError):
                        await self._write_outputs(request, response)
                except ServingError as error:
                    response.release()
                    response.outputs, response.error = None, error
                if request.finished:  # the server abandoned it meanwhile and responded itself
                    response.release()
                else:
                    request.respond(response)
        finally:
            self._delivering = None

    async def _write_outputs(self, request: Request, response: Response) -> None:
        for tensor in response.outputs or ():
            for asked in request.outputs:
                if asked.name == tensor.name and asked.span is not None and tensor.data is not None:
                    await self._helper.write(tensor.data, asked.span)
                    tensor.data, tensor.span = None, asked.span.shared()
                    response.leased = True

    # ---- only with shared memory -------------------------------------------------------------

    def take_output_arena(self, byte_size: int) -> None:
        """Refuse: there is no descriptor to take."""
        raise ValueError("an arena in a session without shared memory")

    async def released(self) -> None:
        """Return: the worker leaves nothing on a device for others."""

    def take_device_arena(self, message: wire.DeviceArenaCreated) -> None:
        """Refuse: others could not open it."""
        raise ValueError("an arena on a device in a session without shared memory")

    def report_fault(self, requests: Collection[Request]) -> None:
        """Do nothing: the worker has no region of a client."""

    def hold(self, number: int, request: Request) -> None:
        """Refuse: the worker's inputs are its own copies."""
        raise ValueError("inputs held in a session without shared memory")

    def free_held(self, numbers: Sequence[int]) -> None:
        """Refuse, see `hold`."""
        raise ValueError("inputs freed in a session without shared memory")

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """The worker is gone. Responses that it has sent are still delivered."""
        self._closed = True
        for message in self._batches:
            if isinstance(message, _Result):
                message.response.release()
        self._batches.clear()
        self._outputs.clear()
        if self._sending is not None:
            self._sending.cancel()
