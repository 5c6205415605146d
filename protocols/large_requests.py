"""What front doors have helpers do: decode requests that are too large for the event loop, and other long work.

`decode_steps` runs in the helper. It describes the request in a message to the kernel process (`DecodedRequest`); the
bytes of the tensors follow, in memory that the kernel process chooses when it knows their sizes. `RequestTask` is the
kernel's side of it, `AwaitedTask` is for coroutines that wait for any other task.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import InternalError, InvalidArgument, RequestCancelled, ServingError
from kernel.serving.helper_tasks import TaskResult
from kernel.serving.request import REQUEST_BYTE_SIZE
from kernel.serving.response import peer_of_sink
from shm.tensor import RequestedOutput, Span, Tensor, decode_lease, encode_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.serving.helper_tasks import TaskSteps
    from kernel.serving.interface import KernelInterface
    from kernel.serving.request import Request
    from kernel.serving.response import ParameterValue
    from kernel.serving.route import ModelRoute
    from shm.arena import Block
    from shm.tensor import Buffer

#: Each tensor begins at a multiple of this many bytes, as in `kernel.memory.input_placement`.
ALIGNMENT = 64

#: The most bytes of names, parameters and shapes of one request. They are decoded on the event loop.
MAX_DESCRIPTION_BYTE_SIZE = 1 << 20


class DecodedRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """The fields of a request. An input without a client's region has its bytes in the memory for the result."""

    inputs: list[Tensor]
    #: The most bytes that each input takes there; 0 for one in a client's region.
    byte_sizes: list[int]
    outputs: list[RequestedOutput] = []
    id: str = ""
    parameters: dict[str, str | int | bool | float] = {}
    correlation_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    #: What the front door needs for the response, encoded by itself.
    response_options: bytes = b""
    #: As the client gave them. Not used where the front door knows the model before the helper does.
    model_name: str = ""
    model_version: str = ""

    @property
    def byte_size(self) -> int:
        """The bytes of memory for the result."""
        return sum(map(aligned, self.byte_sizes))

    def fill(self, request: Request) -> None:
        """Set the fields of `request`, except for the bytes of its inputs."""
        parameters: dict[str, ParameterValue] = dict(self.parameters)
        request.inputs, request.outputs, request.id, request.parameters = self.inputs, self.outputs, self.id, parameters
        request.correlation_id = self.correlation_id
        request.sequence_start, request.sequence_end = self.sequence_start, self.sequence_end
        request.priority, request.timeout_us = self.priority, self.timeout_us


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_lease)

#: Returns what `describe` has encoded.
read_description = msgspec.msgpack.Decoder(DecodedRequest, dec_hook=decode_lease).decode

#: Encodes and reads how many bytes each input has, the message at the end of the task.
encode_sizes, read_sizes = _encoder.encode, msgspec.msgpack.Decoder(list[int]).decode


def describe(request: Request, byte_sizes: list[int], response_options: bytes = b"") -> bytes:
    """Return the message about `request`, of whose inputs the bytes are left out. Raises `InvalidArgument`."""
    described = _encoder.encode(
        DecodedRequest(
            [Tensor(each.name, each.datatype, each.shape, None, None, each.client_span) for each in request.inputs],
            byte_sizes,
            request.outputs,
            request.id,
            request.parameters,
            request.correlation_id,
            request.sequence_start,
            request.sequence_end,
            request.priority,
            request.timeout_us,
            response_options,
            request.model_name,
            request.model_version,
        )
    )
    if len(described) > MAX_DESCRIPTION_BYTE_SIZE:
        raise InvalidArgument(
            f"the names, shapes and parameters of the request take {len(described)} bytes, "
            f"expected at most {MAX_DESCRIPTION_BYTE_SIZE}"
        )
    return described


def aligned(byte_size: int) -> int:
    """Return `byte_size`, rounded up to where the next tensor begins."""
    return -(-byte_size // ALIGNMENT) * ALIGNMENT


class TensorBytes:
    """The bytes of an input that a helper has still to write: up to `byte_size` of them, by `write`."""

    def __init__(self, byte_size: int, write: Callable[[memoryview], int]) -> None:
        """`write` fills the memory that it gets and returns how many bytes it has written."""
        self.byte_size = byte_size
        self.write = write

    @classmethod
    def of(cls, data: Buffer) -> TensorBytes:
        """Return bytes that are in the message as they are."""

        def write(memory: memoryview) -> int:
            memory[:] = data
            return len(data)

        return cls(len(data), write)


def given_bytes(tensor: Tensor) -> TensorBytes | None:
    """Return the bytes of an input that is in the message as it is; None for one in a client's region."""
    return None if tensor.data is None else TensorBytes.of(tensor.data)


def decode_steps(request: Request, contents: list[TensorBytes | None], response_options: bytes = b"") -> TaskSteps:
    """Describe `request`, and write the bytes of its inputs into the memory: the end of every task that decodes.

    `contents` is parallel to the inputs, None for one in a client's region.
    """
    most = [0 if each is None else each.byte_size for each in contents]
    memory = yield describe(request, most, response_options)
    byte_sizes, position = [], 0
    for content, byte_size in zip(contents, most, strict=True):
        byte_sizes.append(0 if content is None else content.write(memory[position : position + byte_size]))
        position += aligned(byte_size)
    return TaskResult(encode_sizes(byte_sizes))


#: A message whose description (JSON, or protobuf without raw tensors) has more bytes is decoded by a helper. Below,
#: decoding takes less time than the way to the helper and back: at most about 3 ms, usually 0.1 ms.
LOOP_BYTE_SIZE = 16 << 10

#: Sources up to this size are sent to the helper in the message.
_INLINE_BYTE_SIZE = 64 << 10


class Preparing(Protocol):
    """Waits for a request that is being decoded. All methods are called once at most, and never raise."""

    def prepared(self, response_options: bytes, route: ModelRoute) -> None:
        """The request, which is for `route`, is decoded: submit it as one that `begin_preparing` has admitted."""

    def refused(self, error: ServingError) -> None:
        """The request is refused."""


class RequestTask:
    """The task for one request. A `kernel.serving.helper_tasks.HelperTask`."""

    def __init__(
        self,
        kernel: KernelInterface,
        route: ModelRoute | None,
        request: Request,
        caller: Preparing,
        name: str,
        arguments: bytes,
        sources: list[Tensor],
    ) -> None:
        """The task owns the leases of `sources`, and from the end on `request` owns the leases of its inputs.

        Without `route` the helper finds out its name and version.
        """
        self.peer = peer_of_sink(request.sink)
        self.name = name
        self.arguments = arguments
        self.sources = sources
        self._kernel = kernel
        self._route = route
        self._request = request
        #: None once the request is not wanted any more.
        self._caller: Preparing | None = caller
        self._block: Block | None = None
        self._response_options = b""
        #: What the request takes while it waits for a helper, beside blocks of arenas.
        inline = sum(len(source.data) for source in sources if source.data is not None)
        self._byte_size = REQUEST_BYTE_SIZE + inline

    def start(self) -> None:
        """Admit the request and start to decode it. Raises `ServingError`; then the sources are released."""
        try:
            self._kernel.begin_preparing(self._request, self._byte_size)
        except ServingError:
            self._release_sources()
            raise
        self._kernel.helpers.add(self)

    def cancel(self) -> None:
        """The request is not wanted any more: call neither method of the caller."""
        self._caller = None
        self._kernel.helpers.cancel(self)

    # ---- kernel.serving.helper_tasks.HelperTask --------------------------------------------------

    def needs_memory(self, message: bytes) -> Span:
        """Check the request, and return memory of its model for its tensors."""
        if self._caller is None:
            raise RequestCancelled
        described = read_description(message)
        request = self._request
        described.fill(request)
        self._response_options = described.response_options
        if self._route is None:
            request.model_name, request.model_version = described.model_name, described.model_version
            self._route = self._find_route(request)
        # Long names and parameters live as long as the request. The block counts for them too, though they are not in
        # it: pages that nobody writes to take no memory.
        beside = len(message) if len(message) > LOOP_BYTE_SIZE else 0
        block = self._block = self._kernel.memory_for(self._route, max(1, described.byte_size) + beside)
        position = block.offset
        for tensor, byte_size in zip(request.inputs, described.byte_sizes, strict=True):
            if tensor.client_span is None:
                tensor.span = Span(block.lease.share(), position, byte_size)
                request.leased = True
                position += aligned(byte_size)
        self._kernel.check_shapes(request, self._route)
        return Span(block.lease, block.offset, block.byte_size)

    def _find_route(self, request: Request) -> ModelRoute:
        if request.streaming:
            return self._kernel.route(request.model_name, request.model_version)
        return self._kernel.unary_route(request.model_name, request.model_version, request.entry_point)

    def done(self, result: bytes, output: Tensor | None) -> None:
        """Cut the tensors of which only the largest size was known, and let the caller submit the request."""
        assert self._block is not None, "a task without memory has decoded a request"
        assert output is None, "a decoded request lies in memory of its model"
        for tensor, byte_size in zip(self._request.inputs, read_sizes(result), strict=True):
            if tensor.span is not None:
                tensor.span = Span(tensor.span.lease, tensor.span.offset, byte_size)
        self._block.release()
        self._release_sources()
        caller, self._caller = self._caller, None
        if caller is None:
            self._request.release_leases()
        else:
            assert self._route is not None, "a request was decoded without its route"
            caller.prepared(self._response_options, self._route)
        self._kernel.end_preparing(self._byte_size)

    def failed(self, error: ServingError) -> None:
        """Release all memory and refuse the request."""
        if self._block is not None:
            self._block.release()
        self._request.release_leases()
        self._release_sources()
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.refused(error)
        self._kernel.end_preparing(self._byte_size)

    def _release_sources(self) -> None:
        for source in self.sources:
            source.release()


def sources_of(kernel: KernelInterface, body: Buffer, received_in: ReceiveBuffer | None) -> list[Tensor]:
    """Return `body` as the source of a task, with a lease of its own. Raises `ArenaFull`."""
    if received_in is not None:
        span = received_in.span(memoryview(body))
        if span is None:
            raise InternalError("a message is not in the buffer that it was received in")
        return [Tensor("", "UINT8", [len(body)], None, span)]
    if len(body) <= _INLINE_BYTE_SIZE:
        return [Tensor("", "UINT8", [len(body)], bytes(body))]
    block = kernel.memory_for_helper(len(body))
    block.view()[:] = body
    return [Tensor("", "UINT8", [len(body)], None, block.span)]


def tensor_with_own_lease(tensor: Tensor) -> Tensor:
    """Return a tensor with the same bytes as a source, with a lease for the task."""
    span = None if tensor.span is None else tensor.span.shared()
    return Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data, span)


def joined(sources: Sequence[memoryview]) -> memoryview:
    """Return the bytes of all sources in one piece; for task functions."""
    return sources[0] if len(sources) == 1 else memoryview(b"".join(sources))


class AwaitedTask:
    """Runs a task whose result a coroutine waits for. A `kernel.serving.helper_tasks.HelperTask`.

    It releases the leases of its sources, and of the memory for its result, when it has ended.
    """

    def __init__(
        self,
        kernel: KernelInterface,
        name: str,
        arguments: bytes,
        sources: list[Tensor],
        take_memory: Callable[[bytes], Block] | None = None,
        peer: str = "",
    ) -> None:
        """`take_memory` returns memory for the result, for what the function has found out; it is `memory` then."""
        self.name = name
        self.arguments = arguments
        self.sources = sources
        self.peer = peer
        self.memory: Block | None = None
        self._kernel = kernel
        self._take_memory = take_memory
        self._result: asyncio.Future[tuple[bytes, Tensor | None]] = asyncio.get_running_loop().create_future()

    async def run(self) -> tuple[bytes, Tensor | None]:
        """Return the message and the output of the function. The caller releases the output, and `memory`.

        Raises `ServingError`.
        """
        self._kernel.helpers.add(self)
        try:
            return await self._result
        except asyncio.CancelledError:
            self._kernel.helpers.cancel(self)
            if not self._result.cancelled():  # it has come, and the caller does not get it
                self._forget()
            raise

    # ---- kernel.serving.helper_tasks.HelperTask --------------------------------------------------

    def needs_memory(self, message: bytes) -> Span:
        """Return the memory for the result."""
        if self._result.done():
            raise RequestCancelled
        if self._take_memory is None:
            raise InternalError(f"task {self.name} needs no memory of the server")
        self.memory = self._take_memory(message)
        return self.memory.span

    def done(self, result: bytes, output: Tensor | None) -> None:
        """Let `run` return."""
        self._release_sources()
        if self._result.done():  # cancelled
            self._release_memory()
            if output is not None:
                output.release()
        else:
            self._result.set_result((result, output))

    def failed(self, error: ServingError) -> None:
        """Let `run` raise."""
        self._release_sources()
        self._release_memory()
        if not self._result.done():
            self._result.set_exception(error)

    def _forget(self) -> None:
        """Release the result that nobody gets."""
        self._release_memory()
        if self._result.exception() is None:
            output = self._result.result()[1]
            if output is not None:
                output.release()

    def _release_sources(self) -> None:
        for source in self.sources:
            source.release()

    def _release_memory(self) -> None:
        if self.memory is not None:
            self.memory.release()
            self.memory = None
