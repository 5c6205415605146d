"""What a backend can ask of other models and of the server."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from shm.tensor import Tensor  # noqa: TC001 - msgspec may read annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from backends.transport import wire
    from backends.worker.request import OutputValue
    from kernel.errors import ServingError

Result = TypeVar("Result")


class CallRequest(msgspec.Struct):
    """A request to another model."""

    model_name: str
    #: Values, or tensors with their bytes inline.
    inputs: Sequence[OutputValue | Tensor]
    #: Empty for the newest version that serves.
    model_version: str = ""
    #: The requested outputs; empty for all.
    outputs: Sequence[str] = ()
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    parameters: Mapping[str, str | int | bool | float] = {}
    #: Whether several responses are accepted, of a decoupled model.
    streaming: bool = False
    #: The numbers of the requests for which the model calls; None if that is not known.
    parents: Sequence[int] | None = None
    #: Whether the execution of these requests cannot end without the response; None if that is not known.
    blocking: bool | None = None
    #: The number of the request whose trace the call belongs to; 0 for none.
    trace_parent: int = 0
    #: Whether results may be in memory of a device, if they are made there and this worker has a device.
    on_device: bool = True


#: How many bytes of responses of a stream are received before the model asks for them, if the call reads ahead.
READ_AHEAD_BYTE_SIZE = 64 << 20


class CallResponse(msgspec.Struct):
    """A response to a call. With an error there are no outputs; without both it only marks the end."""

    #: Each with its bytes in `data`: bytes of a message, or a view of shared memory that the model may change.
    outputs: list[Tensor] = []
    parameters: dict[str, wire.ParameterValue] = {}
    error: ServingError | None = None
    final: bool = False
    #: Whether it only marks the end of the responses.
    empty: bool = False


class ModelCall:
    """A call that was sent. `responses` are those that nobody has taken yet."""

    __slots__ = (
        "ahead_byte_size", "ahead_count", "cancelled", "consumed", "discarded", "ended", "number", "on_response",
        "reads_ahead", "request", "responses", "streaming",
    )  # fmt: skip

    def __init__(self, number: int, *, streaming: bool) -> None:
        #: Another one if the call is sent again, see `wire.CallOnHost`.
        self.number = number
        #: What to send again, as long as that may be needed.
        self.request: CallRequest | None = None
        #: Whether the model has cancelled it.
        self.cancelled = False
        self.streaming = streaming
        self.responses: deque[CallResponse] = deque()
        #: Whether the final response has come. It is among the responses before that is set.
        self.ended = False
        #: Called by the reading thread for each response, and when the kernel is gone; it must not block.
        self.on_response: Callable[[], None] | None = None
        #: Responses that were taken and not reported yet.
        self.consumed = 0
        #: Whether nobody wants the responses any more.
        self.discarded = False
        #: Whether responses of a stream are reported as taken when they come, up to `READ_AHEAD_BYTE_SIZE` together.
        self.reads_ahead = False
        #: How many of `responses` were reported so, and the bytes of all that ever were.
        self.ahead_count = self.ahead_byte_size = 0


class ModelCalls(Protocol):
    """What a backend can ask of other models and of the server. Any thread may use it. Implemented by `WorkerCalls`."""

    def start(self, request: CallRequest) -> ModelCall:
        """Send a request to another model. Raises `ServingError` if it cannot be sent; other errors are responses."""

    def wait(self, call: ModelCall) -> CallResponse:
        """Wait for the next response of `call` and return it. Not after the final one."""

    def take(self, call: ModelCall) -> CallResponse | None:
        """Return the next response of `call` if it has come, else None."""

    def notify(self, call: ModelCall, on_response: Callable[[], None]) -> None:
        """Call `on_response` whenever a response of `call` has come, from another thread, until it has ended."""

    def cancel(self, call: ModelCall) -> None:
        """Cancel `call`, unless it has ended. It still gets its final response."""

    def discard(self, call: ModelCall) -> None:
        """Let `call` continue without anybody taking its responses."""

    def wait_for(self, future: Future[Result]) -> Result:
        """Wait for the result of another thread of the model, from the thread that executes. Raises as the future.

        In a process of several models, others have their turn while the model waits for calls.
        """

    def control(
        self,
        action: str,
        model_name: str,
        *,
        version: str = "",
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        unload_dependents: bool = False,
    ) -> bool:
        """Load or unload a model, or return whether it is ready. Raises `ServingError`."""
