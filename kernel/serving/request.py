"""An inference request, from the front door that decoded it to its final response.

Ownership: a front door makes a `Request` and gives it to `Kernel.submit`. From then on only the kernel responds, by
the request's sink, with exactly one final response, also if it refuses the request. Buffers in `data` must not
change before the final response.
"""

from __future__ import annotations

from sys import getsizeof
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import RequestCancelled
from kernel.serving.response import Response

if TYPE_CHECKING:
    from collections.abc import Collection

    from kernel.errors import ServingError
    from kernel.observe.execution_reports import ComposedTimes
    from kernel.records.trace import Trace
    from kernel.serving.live_sequences import Sequence
    from kernel.serving.response import ParameterValue, ResponseReceiver, Sink
    from shm.blocks import ByteBudget
    from shm.tensor import RequestedOutput, Tensor

#: About how many bytes a queued request and the call of its front door take, beside its tensors.
REQUEST_BYTE_SIZE = 1024

#: An id up to this length counts as a part of `REQUEST_BYTE_SIZE`.
_SHORT_ID = 64

#: About how many bytes a parameter takes, beside its texts.
_PARAMETER_BYTE_SIZE = 100


class RequestOwner(Protocol):
    """Receives the events of a submitted request. Called in the kernel's loop; never raises.

    The owner of a client's request is its model version, the owner of a warm-up request is the warm-up.
    """

    def responded(self, request: Request, response: Response) -> None:
        """`response` is sent to the sink of `request` after this call."""

    def consumed(self, request: Request, count: int) -> None:
        """The client took `count` responses of `request`."""

    def cancelled(self, request: Request) -> None:
        """The client of `request` has disconnected. The request still gets its final response."""


class ClientlessSink:
    """The sink of a request that no client has sent. As it is, for one that is not submitted itself (`NO_SINK`)."""

    peer = ""

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        raise AssertionError("a request that was never submitted got a response")


#: For requests that are prepared, only checked, or decoded for another process.
NO_SINK = ClientlessSink()


class WantedInference(msgspec.Struct, eq=False):
    """What is wanted of one inference: by a client, by a step of an ensemble, or by a model that calls another one.

    Set by the code that makes the request. The kernel changes only where the bytes of tensors are.
    """

    #: The model's name from the client.
    model_name: str
    #: Each with `data`, with a `client_span`, or with a `span` whose lease the request owns from now on.
    inputs: list[Tensor]
    sink: Sink
    #: The version from the client; empty for the newest that is ready.
    model_version: str = ""
    #: The id from the client; empty without one.
    id: str = ""
    #: The requested outputs; empty for all.
    outputs: list[RequestedOutput] = []
    #: Custom parameters, which the model gets unchanged.
    parameters: dict[str, ParameterValue] = {}
    correlation_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: A priority level of the model, from 1 (the first) on; 0 for its default level.
    priority: int = 0
    #: The client's timeout in microseconds; 0 for none.
    timeout_us: int = 0
    #: Whether the call can carry more than one response (a gRPC stream, /generate_stream).
    streaming: bool = False
    #: The name of a unary call in errors, such as `ModelInfer RPC` (Triton's words).
    entry_point: str = "inference"

    #: Whether the client wants to know how the request travels; see `kernel.records.traced_passage`.
    explain: bool = False

    #: The request for which this one is made: a step of an ensemble, or a call of a model. It is admitted while its
    #: parent lives, also while the server drains, and its tensors were paid for by the parent.
    parent: Request | None = None
    #: The request of whose trace this one's trace is a child: that to the ensemble, or that of a model which has passed
    #: its trace on with a call. None if there is none; then the request is not traced, unless it is a client's.
    trace_parent: Request | None = None


class Request(WantedInference, eq=False):
    """One inference request: what is wanted of it, and what the kernel keeps of it.

    One object has both, because a second one would be made for each request: code that only reads what is wanted takes
    a `WantedInference`. A front door sets attributes of this class only in a request that it has prepared.
    """

    #: The trace of this request; set by `Kernel.submit` if it is traced.
    trace: Trace | None = None
    #: What gets the responses before `sink`, and passes them on; None for most requests. In this order, of which each
    #: knows the next: the place in an order of responses, the response cache, the recorder, the trace.
    passage: ResponseReceiver | None = None
    #: Only of a request to an ensemble: the compute times of its steps.
    composed: ComposedTimes | None = None
    #: Only of a request to an ensemble: the requests of its steps that have no final response. Its scheduler's.
    steps: Collection[Request] = ()

    #: Which of 10,000 shares of a model's traffic a client's request belongs to, for the requests that are made for it
    #: (`kernel.traffic.route`); -1 while nothing has asked.
    bucket: int = -1

    owner: RequestOwner | None = None
    #: Rows of the request: the first dimension of its inputs where the model batches, else 1.
    batch_size: int = 1
    #: When the kernel received the request, in monotonic nanoseconds.
    received_ns: int = 0
    #: When the request was queued, in monotonic nanoseconds.
    queue_start_ns: int = 0
    #: Whether the request was dispatched to an instance. False again if the instance is lost and the request is queued.
    dispatched: bool = False
    finished: bool = False
    cancelled: bool = False
    #: The error of a queued request that was given up, see `expire`.
    expiry: ServingError | None = None
    response_count: int = 0
    #: Whether a response with an error was sent.
    failed: bool = False
    #: The sequence that the request belongs to; None for a model without sequences.
    sequence: Sequence | None = None
    #: How often a worker was lost that would have executed the request next.
    lost_before_start: int = 0
    #: With how many workers the request was lost while they executed it. If any, it shares no batch
    #: (`kernel.serving.poison`).
    suspected: int = 0
    #: When the client gives up, in monotonic nanoseconds; 0 if that is not known.
    deadline_ns: int = 0
    #: About how many bytes the request takes beside blocks of arenas. If it had to be queued, they count in `budget`
    #: until its final response.
    byte_size: int = 0
    budget: ByteBudget | None = None
    #: Whether inputs or outputs may have spans, and so leases.
    leased: bool = False
    #: Whether a worker uses the leased memory. Then the leases are released when the worker has finished or is gone,
    #: even if the client got its final response earlier.
    in_use: bool = False

    def count_in(self, budget: ByteBudget) -> None:
        """Count the request in `budget` until its final response: it has to be queued."""
        self.budget = budget
        if self.parameters or len(self.id) > _SHORT_ID or type(self.correlation_id) is str:
            self.byte_size += self._text_byte_size()
        budget.used_byte_size += self.byte_size

    def _text_byte_size(self) -> int:
        """Return how many bytes the texts take that the client has chosen: a text takes up to four times its UTF-8."""
        texts: list[object] = [self.id, self.correlation_id, *self.parameters, *self.parameters.values()]
        return sum(map(getsizeof, texts)) + _PARAMETER_BYTE_SIZE * len(self.parameters)

    def copy(self) -> Request:
        """Return a new request with the same attribute values, which are not copied."""
        return self.__copy__()  # type: ignore[attr-defined,no-any-return]  # every msgspec.Struct has it

    def respond(self, response: Response) -> None:
        """Send one response; a final one ends the request, and releases its leases unless a worker uses the memory.

        Raises AssertionError for a response after the final one, which is a bug of ours.
        """
        assert not self.finished, f"request {self.id!r} got a response after its final one"
        if response.final:
            self.finished = True
            if (budget := self.budget) is not None:
                budget.used_byte_size -= self.byte_size
            if self.leased and not self.in_use:
                self.release_leases()
        if response.outputs is not None or response.error is not None:  # not `response.empty`
            self.response_count += 1
        if self.owner is not None:
            self.owner.responded(self, response)
        (self.passage or self.sink).send(response)

    def fail(self, error: ServingError) -> None:
        """Send `error` as the final response; for a cancelled request that has expired, the error of that."""
        if self.expiry is not None and isinstance(error, RequestCancelled):
            error = self.expiry
        self.respond(Response(self.model_name, self.model_version, self.id, error=error, final=True))

    def refuse(self, error: ServingError) -> None:
        """Send `error` as the only response of a request that is not queued. Its leases are released."""
        self.release_leases()
        self.leased, self.failed = False, True
        self.respond(Response(self.model_name, self.model_version, self.id, error=error, refused=True))

    def consumed(self, count: int = 1) -> None:
        """The client took `count` responses: the model may send the same number again (credit)."""
        if self.owner is not None and not self.finished:
            self.owner.consumed(self, count)

    def cancel(self) -> None:
        """Cancel the request, for a client that disconnected. It still gets its final response. Can be called twice."""
        if not self.finished and not self.cancelled:
            self.cancelled = True
            if self.owner is not None:
                self.owner.cancelled(self)

    def expire(self, error: ServingError) -> None:
        """Cancel a queued request whose client still waits: it gets `error`."""
        if not self.finished and not self.cancelled:
            self.expiry = error
            self.cancel()

    def release_leases(self) -> None:
        """Release the leases of all inputs and outputs."""
        for tensor in self.inputs:
            if tensor.span is not None:
                tensor.span.lease.release()
        for output in self.outputs:
            if output.span is not None:
                output.span.lease.release()
