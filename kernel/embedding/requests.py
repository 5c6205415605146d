"""Requests of a program that embeds the server: they are submitted on the server's loop, and a thread of the program
waits for the responses.

The kernel checks them like requests of front doors, in the same order and with the same texts. Inputs and outputs are
arrays.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import msgspec

from kernel.errors import InternalError, InvalidArgument, ServingError
from kernel.observe.limited_log import LimitedLog
from kernel.serving.request import ClientlessSink, Request
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kernel.config.spec import ModelSpec
    from kernel.serving.kernel import Kernel
    from kernel.serving.response import ParameterValue, Response
    from shm.arrays import Array

_failures = LimitedLog(logging.getLogger(__name__))

_UINT64 = range(2**64)
_INT64 = range(-(2**63), 2**63)

_encoder = msgspec.msgpack.Encoder()


class ServerLoop(Protocol):
    """A running server, as other threads see it. Only callbacks on the server's loop may use the kernel."""

    kernel: Kernel

    def post(self, callback: Callable[[], object]) -> None:
        """Let the loop call `callback`. Raises `NotRunning` if the server has ended."""


class RequestOptions(TypedDict, total=False):
    """Optional parts of a request. Meanings are as in Triton's protocols."""

    #: Empty for the newest version.
    model_version: str | int
    #: Names of outputs, or name → number of best classes to return (0 for the tensor itself). Default: all outputs.
    outputs: Sequence[str] | Mapping[str, int]
    #: The id of the request, which its responses have, too.
    request_id: str
    #: Custom parameters; the model gets them unchanged.
    parameters: Mapping[str, str | int | bool | float]
    #: The sequence that the request belongs to; 0 or an empty text for none.
    correlation_id: int | str
    #: Whether the request is the first of its sequence.
    sequence_start: bool
    #: Whether the request is the last of its sequence.
    sequence_end: bool
    #: A priority level of the model, from 1 (the first) on; 0 for its default level.
    priority: int
    #: How long the request may wait in its queue, in microseconds, if the model's queue policy allows the override.
    timeout_us: int
    #: Seconds that the caller waits for a response. After them it gets `TimeoutError` and the request is cancelled.
    client_timeout: float


class Outputs(dict[str, "Array"]):
    """The outputs of a response: name → array. The caller owns the arrays."""

    def __init__(self, response: Response) -> None:
        from kernel.embedding import arrays

        super().__init__((output.name, arrays.output_array(output)) for output in response.outputs or ())
        self.model_name = response.model_name
        self.model_version = response.model_version
        self.request_id = response.id
        #: Parameters that the model set in the response.
        self.parameters: dict[str, ParameterValue] = response.parameters or {}


class EmbeddedCall(ClientlessSink):
    """A request of the program. It is the request's sink, and passes responses to a thread of the program.

    The creator sets `request` before `begin`. A thread that no longer waits for responses calls `abandon`.
    """

    def __init__(self, server: ServerLoop, client_timeout: float | None) -> None:
        self.request: Request
        self._server = server
        self._client_timeout = client_timeout
        self._arrived: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._abandoned = False
        self._ended = False

    # ---- in the program's thread -------------------------------------------------------------

    def begin(self) -> None:
        """Submit the request on the server's loop. Raises `NotRunning`; any other error arrives as its response."""
        self._server.post(self._submit)

    def only_outputs(self) -> Outputs:
        """Wait for the single response and return its outputs.

        Raises the response's `ServingError`, `InternalError` if the number of responses is not 1, or `TimeoutError`.
        """
        found: Outputs | None = None
        count = 0
        while (outputs := self.next_outputs()) is not None:
            found = outputs
            count += 1
        if found is None or count != 1:
            raise InternalError(f"expected a single response, got {count}")
        return found

    def next_outputs(self) -> Outputs | None:
        """Wait for the next response and return its outputs; None after the last response.

        Raises the response's `ServingError`, after which more responses may follow, or `TimeoutError`.
        """
        while not self._ended:
            try:
                response = self._arrived.get(timeout=self._client_timeout)
            except queue.Empty:
                raise TimeoutError(
                    f"model '{self.request.model_name}' did not respond within {self._client_timeout:g} s"
                ) from None
            self._ended = response.final
            try:
                if response.error is not None:
                    raise response.error
                if not response.empty:
                    return Outputs(response)
            finally:
                self._consume(response)
        return None

    def _consume(self, response: Response) -> None:
        """Release the response's memory, and let a model that waits for its client send the next response."""

        def release() -> None:
            response.release()
            self.request.consumed()

        if response.leased or not response.final:
            with contextlib.suppress(ServingError):  # a server that has ended has freed its memory
                self._server.post(release)

    def abandon(self) -> None:
        """Drop all further responses, and cancel the request if it still runs."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ServingError):
                self._server.post(self._abandon)

    # ---- on the server's loop ----------------------------------------------------------------

    def send(self, response: Response) -> None:
        if self._abandoned:
            response.release()
        else:
            self._arrived.put(response)

    def _submit(self) -> None:
        self._server.kernel.submit(self.request)

    def _abandon(self) -> None:
        self._abandoned = True
        while not self._arrived.empty():
            self._arrived.get().release()
        self._server.kernel.cancel(self.request)


class ResponseStream:
    """An iterator over the responses of one request. Closing or dropping the stream cancels the request.

    A response with an error is raised as `ServingError`; the iteration can continue after it. Only one thread at a time
    may use the stream.
    """

    def __init__(self, call: EmbeddedCall) -> None:
        self._call = call

    def __iter__(self) -> ResponseStream:
        return self

    def __next__(self) -> Outputs:
        try:
            outputs = self._call.next_outputs()
        except ServingError:
            raise
        except BaseException:  # a timeout or an interrupt
            self.close()
            raise
        if outputs is None:
            raise StopIteration
        return outputs

    def close(self) -> None:
        """Drop all further responses, and cancel the request if it still runs."""
        self._call.abandon()

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def make_call(
    server: ServerLoop,
    spec: ModelSpec,
    model_name: str,
    inputs: Mapping[str, Any],
    options: RequestOptions,
    *,
    streaming: bool,
) -> EmbeddedCall:
    """Return a call with a new request; `begin` submits it.

    Plain values in `inputs` are converted to the datatypes of `spec`, see `arrays.input_tensor` for shapes and
    ownership. Raises `InvalidArgument`, or `TypeError` for an unknown option.
    """
    from kernel.embedding import arrays

    given = read_options(options)
    if not isinstance(inputs, Mapping):
        raise TypeError(f"inputs must be a mapping of names to arrays, got {type(inputs).__name__}")
    expected = {name: tensor.datatype for name, tensor in spec.inputs.items()}
    tensors = [arrays.input_tensor(name, value, expected.get(name)) for name, value in inputs.items()]
    call = EmbeddedCall(server, given.get("client_timeout"))
    call.request = Request(
        model_name,
        tensors,
        call,
        model_version=str(given.get("model_version", "")),
        id=given.get("request_id", ""),
        outputs=_requested(given.get("outputs", ())),
        parameters=dict(given.get("parameters", {})),
        correlation_id=given.get("correlation_id", 0),
        sequence_start=given.get("sequence_start", False),
        sequence_end=given.get("sequence_end", False),
        priority=given.get("priority", 0),
        timeout_us=given.get("timeout_us", 0),
        streaming=streaming,
        entry_point="infer(), unlike stream(),",
    )
    return call


def read_options(options: RequestOptions) -> RequestOptions:
    """Check the options: their types, and that they fit into messages to a worker.

    Raises `InvalidArgument`, or `TypeError` for an unknown option.
    """
    for name in options:
        if name not in RequestOptions.__optional_keys__:
            raise TypeError(f"a request has no option '{name}', only {', '.join(RequestOptions.__annotations__)}")
    try:
        given = msgspec.convert(options, RequestOptions)
        _encoder.encode((given.get("request_id"), given.get("correlation_id"), given.get("parameters")))
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError) as error:
        raise InvalidArgument(f"invalid option of a request: {error}") from None
    for name in ("correlation_id", "priority", "timeout_us"):
        value = given.get(name, 0)
        if isinstance(value, int) and value not in _UINT64:
            raise InvalidArgument(f"{name} must be an unsigned integer of 64 bits, got {value}")
    for key, value in given.get("parameters", {}).items():
        if key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        if isinstance(value, int) and value not in _INT64:
            raise InvalidArgument(f"parameter '{key}' must be an integer of 64 bits, got {value}")
    return given


def _requested(outputs: Sequence[str] | Mapping[str, int]) -> list[RequestedOutput]:
    if not isinstance(outputs, Mapping):
        return [RequestedOutput(name) for name in outputs]
    for name, count in outputs.items():
        if count < 0:
            raise InvalidArgument(f"the number of classes of output '{name}' is negative: {count}")
    return [RequestedOutput(name, classification=count) for name, count in outputs.items()]
