"""Has a helper decode a request that is too large for the event loop. All front doors use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernel.errors import InternalError, RequestCancelled, ServingError
from kernel.serving.request import REQUEST_BYTE_SIZE
from kernel.serving.response import peer_of_sink
from protocols.helpers.decoded_request import aligned, read_description, read_sizes
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.front_doors.interface import KernelInterface
    from kernel.serving.front_doors.route import ModelRoute
    from kernel.serving.request import Request
    from shm.arena import Block
    from shm.tensor import Buffer

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
        """The task owns the leases of `sources`, and from the end on `request` owns those of its inputs.

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
