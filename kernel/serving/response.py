"""Responses, and the sinks that carry them back to the front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.serving.request import Buffer, ParameterValue, SharedMemoryRef


class OutputTensor(msgspec.Struct):
    """One output. `data` is None where the worker wrote it to the client's region `shared_memory`.

    `data` is in the wire's raw form, see `kernel.serving.request.InputTensor`; it may point into a worker's
    arena and is valid until the response is released.
    """

    name: str
    datatype: str
    shape: list[int]
    data: Buffer | None = None
    shared_memory: SharedMemoryRef | None = None


class Response(msgspec.Struct, eq=False):
    """One response of a request. Unary requests get one, with `final` set; decoupled ones any number.

    A response that is `empty` only says that no more will come. The front door owns a response that
    its sink was given: it calls `release` once it has copied or sent the outputs.
    """

    model_name: str
    model_version: str
    id: str
    outputs: list[OutputTensor] | None = None
    parameters: dict[str, ParameterValue] | None = None
    error: ServingError | None = None
    final: bool = True
    #: Gives the blocks that `outputs` point into back to their worker; None once that was done.
    on_release: Callable[[], None] | None = None

    @property
    def empty(self) -> bool:
        """True where the response has neither outputs nor an error: only the final flag counts."""
        return self.outputs is None and self.error is None

    def release(self) -> None:
        """Give the blocks that `outputs` point into back to their worker. More calls do nothing."""
        if self.on_release is not None:
            release, self.on_release = self.on_release, None
            release()


class Sink(Protocol):
    """Where a request's responses go. Called from the kernel's loop, never blocks, never raises."""

    def send(self, response: Response) -> None: ...
