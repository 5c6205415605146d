"""An inference request, from the front door that decoded it to its one final response.

Ownership: a front door builds a `Request` and hands it to `Kernel.submit`. If `submit` raises, the front door still
owns it and responds to its client; afterwards only the kernel responds, through the request's sink, with exactly one
final response. Buffers in `data` must stay unchanged until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.serving.response import Response

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from kernel.serving.response import Sink
    from shm.tensor import RequestedOutput, Tensor

#: What a custom request or response parameter may be.
ParameterValue = str | int | bool | float


class RequestOwner(Protocol):
    """Who has a submitted request: it hears what becomes of it. Called from the kernel's loop; never raises.

    A request that clients sent is owned by its model version, a request of a warm-up by that warm-up.
    """

    def responded(self, request: Request, response: Response) -> None:
        """`response` is about to be given to the sink of `request`."""

    def consumed(self, request: Request, count: int) -> None:
        """The client took `count` responses of `request`."""

    def cancelled(self, request: Request) -> None:
        """The client of `request` has gone. The request still gets its final response."""


class Request(msgspec.Struct, eq=False):
    """One inference request. The first block of attributes is the front door's, the second the kernel's."""

    #: Name as the client gave it.
    model_name: str
    #: Each with `data`, with a `client_span`, or with a span whose lease becomes the request's.
    inputs: list[Tensor]
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
    #: Timeout that the client asked for, in microseconds; 0 for none.
    timeout_us: int = 0
    #: Whether the call can carry more than one response (a gRPC stream, /generate_stream).
    streaming: bool = False
    #: What a call without `streaming` is called in errors, such as `ModelInfer RPC` (Triton's words).
    entry_point: str = "inference"

    owner: RequestOwner | None = None
    #: Rows of the request: the first dimension of its inputs where the model batches, else 1.
    batch_size: int = 1
    #: Monotonic nanoseconds: when the kernel took the request, and when it entered the queue.
    received_ns: int = 0
    queue_start_ns: int = 0
    #: Whether an instance was given the request. It stays true when the instance is lost and the request queued again.
    dispatched: bool = False
    finished: bool = False
    cancelled: bool = False
    response_count: int = 0
    #: Whether a response with an error was given.
    failed: bool = False
    #: Whether an input or output may have a span, thus a lease.
    leased: bool = False
    #: Whether a worker uses the leased memory. Then the leases end when the worker has finished, or is gone, also where
    #: the client got its final response before.
    in_use: bool = False

    def copy(self) -> Request:
        """Return a request with the same attributes, the very same."""
        return self.__copy__()  # type: ignore[attr-defined,no-any-return]  # every msgspec.Struct has it

    def respond(self, response: Response) -> None:
        """Send one response; a final one ends the request, and releases its leases unless a worker uses the memory.

        A response after the final one is a bug of ours and raises.
        """
        assert not self.finished, f"request {self.id!r} got a response after its final one"
        if response.final:
            self.finished = True
            if self.leased and not self.in_use:
                self.release_leases()
        if response.outputs is not None or response.error is not None:  # not empty
            self.response_count += 1
        if self.owner is not None:
            self.owner.responded(self, response)
        self.sink.send(response)

    def fail(self, error: ServingError) -> None:
        """Send `error` as the final response."""
        self.respond(Response(self.model_name, self.model_version, self.id, error=error, final=True))

    def consumed(self, count: int = 1) -> None:
        """The client took `count` responses: a model that waits for that may send as many more."""
        if self.owner is not None and not self.finished:
            self.owner.consumed(self, count)

    def cancel(self) -> None:
        """The client has gone. The request still gets its final response; a second call does nothing."""
        if not self.finished and not self.cancelled:
            self.cancelled = True
            if self.owner is not None:
                self.owner.cancelled(self)

    def release_leases(self) -> None:
        """Release every lease that inputs and outputs have."""
        for tensor in self.inputs:
            if tensor.span is not None:
                tensor.span.lease.release()
        for output in self.outputs:
            if output.span is not None:
                output.span.lease.release()
