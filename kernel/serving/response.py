"""Responses, and the sinks that carry them back to the front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from kernel.serving.request import ParameterValue
    from shm.tensor import Tensor


class Response(msgspec.Struct, eq=False):
    """One response of a request. Unary requests get one, with `final` set; decoupled ones any number.

    A response that is `empty` only says that no more will come. Who the sink hands a response to owns it, and calls
    `release` once the outputs were sent, copied, or passed on with leases of their own.
    """

    model_name: str
    model_version: str
    id: str
    outputs: list[Tensor] | None = None
    parameters: dict[str, ParameterValue] | None = None
    error: ServingError | None = None
    final: bool = True
    #: Whether an output has a span, thus a lease. False again after `release`.
    leased: bool = False

    @property
    def empty(self) -> bool:
        """True where the response has neither outputs nor an error: only the final flag counts."""
        return self.outputs is None and self.error is None

    def release(self) -> None:
        """Release the leases of the outputs. More calls do nothing."""
        if self.leased:
            self.leased = False
            for output in self.outputs or ():
                output.release()


class Sink(Protocol):
    """Where a request's responses go. Called from the kernel's loop, never blocks, never raises."""

    def send(self, response: Response) -> None: ...
