"""A request as a backend sees it: its inputs as buffers, and one way to answer it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.transport import wire
    from kernel.errors import ServingError
    from shm.arrays import Array
    from shm.tensor import Tensor


class OutputValue(msgspec.Struct):
    """One output: an array in C order, or any that can be copied to one. BYTES are object arrays.

    `datatype` is a protocol name. BF16, that numpy lacks, is given as an array of uint16.
    """

    name: str
    datatype: str
    array: Any


class Responder(Protocol):
    """How answers leave the worker. Callable from any thread."""

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None: ...

    def respond(self, request: WorkerRequest, outputs: Sequence[OutputValue],
                parameters: Mapping[str, str | int | bool], final: bool) -> None: ...  # fmt: skip

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None: ...

    def finish(self, request: WorkerRequest) -> None: ...

    def is_cancelled(self, request: WorkerRequest) -> bool: ...


class WorkerRequest(msgspec.Struct, eq=False):
    """One request of a batch. It gets exactly one final answer, by `respond`, `fail` or `finish`."""

    #: Id, flags, correlation id, priority, time-out and parameters, as they came.
    ref: wire.RequestMessage
    #: Each with its bytes in `data`: those of the message, or a view of shared memory. A view that is read-only is of
    #: a client's memory, see `in_memory_of_client`.
    inputs: list[Tensor]
    #: Where the answers go.
    responder: Responder
    finished: bool = False
    response_count: int = 0
    #: Places that `reserve` handed out, by output name. The responder's.
    reserved: dict[str, tuple[Any, Tensor]] = {}

    @property
    def id(self) -> str:
        return self.ref.id

    def input(self, name: str) -> Tensor | None:
        """Return the input called `name`, or None where the client left it out."""
        for view in self.inputs:
            if view.name == name:
                return view
        return None

    def wants(self, name: str) -> bool:
        """Whether the client asked for this output: by name, or by naming none."""
        for output in self.ref.outputs:
            if output.name == name:
                return True
        return not self.ref.outputs

    def reserve(self, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        """Return a C-ordered array at the output's final place, to write the output into.

        Handing the same array to `respond` then costs no copy. None where there is no such place
        (BYTES, classification, a small tensor that travels in the message, a region too small);
        `respond` takes care of those.
        """
        return self.responder.reserve(self, name, datatype, shape)

    def respond(
        self,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool] | None = None,
        *,
        final: bool = True,
    ) -> None:
        """Send a response. Outputs that the client did not ask for are left out.

        Arrays may be changed or freed once this returns, but for inputs of the request. Waits where a decoupled model
        is too far ahead of its client.
        """
        self.responder.respond(self, outputs, parameters or {}, final)

    def fail(self, error: ServingError, *, final: bool = True) -> None:
        """Send `error` as a response."""
        self.responder.fail(self, error, final)

    def finish(self) -> None:
        """Say that no more responses come (decoupled models)."""
        self.responder.finish(self)

    def is_cancelled(self) -> bool:
        """Whether the client has gone. Cheap enough to be asked in a loop."""
        return self.responder.is_cancelled(self)


def in_memory_of_client(tensor: Tensor) -> bool:
    """Whether an input of a request lies in a client's memory, which the client may change and the model may not."""
    return type(tensor.data) is memoryview and tensor.data.readonly
