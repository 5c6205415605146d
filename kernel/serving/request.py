"""An inference request, from the front door that decoded it to its one final answer.

Ownership: a front door builds a `Request` and hands it to `Kernel.submit`. If `submit` raises, the
front door still owns it and answers; afterwards only the kernel answers, through the request's sink,
with exactly one final response. `data` buffers must stay unchanged until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.serving.response import Response

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from kernel.serving.instances import Instance
    from kernel.serving.model import Model
    from kernel.serving.response import Sink
    from shm.region import Span

#: What a custom request or response parameter may be.
ParameterValue = str | int | bool | float

#: Buffers that hold tensor bytes.
Buffer = bytes | bytearray | memoryview


class SharedMemoryRef(msgspec.Struct, frozen=True):
    """A byte range of a region that a client registered, by the region's name."""

    name: str
    byte_size: int
    offset: int = 0


class InputTensor(msgspec.Struct):
    """One input. Exactly one of `data` and `shared_memory` is set by the front door.

    `shape` includes the batch dimension. `data` is the tensor in the wire's raw form: little-endian,
    row-major; BYTES elements behind 4-byte lengths. The kernel sets `span` where the bytes are in a
    region: a client's, or the arena block that it copied a large `data` to.
    """

    name: str
    datatype: str
    shape: list[int]
    data: Buffer | None = None
    shared_memory: SharedMemoryRef | None = None
    span: Span | None = None

    @property
    def byte_size(self) -> int:
        if self.data is not None:
            return len(self.data)
        return self.shared_memory.byte_size if self.shared_memory else 0


class RequestedOutput(msgspec.Struct):
    """An output that the client asked for by name.

    `classification` above 0 asks for that many best classes instead of the tensor. With
    `shared_memory` the worker writes the tensor there and the response carries no data.
    """

    name: str
    classification: int = 0
    shared_memory: SharedMemoryRef | None = None
    span: Span | None = None


class Request(msgspec.Struct, eq=False):
    """One inference request. The first block of attributes is the front door's, the second the kernel's."""

    #: Name as the client gave it.
    model_name: str
    inputs: list[InputTensor]
    sink: Sink
    #: Version as the client gave it; empty means the newest that is ready.
    model_version: str = ""
    id: str = ""
    #: Outputs asked for; empty means all.
    outputs: list[RequestedOutput] = []
    #: Custom parameters, passed on to the model as they are.
    parameters: dict[str, ParameterValue] = {}
    correlation_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    #: Time-out that the client asked for, in microseconds; 0 for none.
    timeout_us: int = 0
    #: Whether the call can carry more than one response (a gRPC stream, /generate_stream).
    streaming: bool = False
    #: What a call without `streaming` is called in errors, such as `ModelInfer RPC` (Triton's words).
    entry_point: str = "inference"

    model: Model | None = None
    #: Rows of the request: the first dimension of its inputs where the model batches, else 1.
    batch_size: int = 1
    #: Monotonic nanoseconds: when the kernel took the request, and when it entered the queue.
    received_ns: int = 0
    queue_start_ns: int = 0
    finished: bool = False
    cancelled: bool = False
    response_count: int = 0
    #: Whether a response with an error was given.
    failed: bool = False
    #: Whether an input or output may have a span, thus a lease.
    leased: bool = False
    #: The instance that executes the request, None while it is queued, and the number by which its worker knows it.
    instance: Instance | None = None
    number: int = 0

    def copy(self) -> Request:
        """Return a request with the same attributes, the very same."""
        return self.__copy__()  # type: ignore[attr-defined,no-any-return]  # every msgspec.Struct has it

    @property
    def dispatched(self) -> bool:
        """Whether an instance was given the request."""
        return self.instance is not None

    def respond(self, response: Response) -> None:
        """Send one response; a final one ends the request and gives its leases back.

        A response after the final one is a bug of ours and raises.
        """
        assert not self.finished, f"request {self.id!r} was answered after its final response"
        if response.final:
            self.finished = True
            if self.leased:
                self.release_leases()
        if response.outputs is not None or response.error is not None:  # not empty
            self.response_count += 1
        if self.model is not None:
            self.model.answered(self, response)
        self.sink.send(response)

    def fail(self, error: ServingError) -> None:
        """Send `error` as the final response."""
        self.respond(Response(self.model_name, self.model_version, self.id, error=error, final=True))

    def consumed(self, count: int = 1) -> None:
        """The client took `count` responses: a model that waits for that may send as many more."""
        if self.instance is not None and not self.finished:
            self.instance.consumed(self, count)

    def release_leases(self) -> None:
        """Give back every region that inputs and outputs use."""
        for tensor in self.inputs:
            if tensor.span is not None:
                tensor.span.lease.release()
        for output in self.outputs:
            if output.span is not None:
                output.span.lease.release()
