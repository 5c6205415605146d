"""Responses, and the sinks that take them to the front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import ServingError

if TYPE_CHECKING:
    from shm.tensor import Tensor

#: The types of a custom request or response parameter.
ParameterValue = str | int | bool | float


class Response(msgspec.Struct, eq=False):
    """One response of a request. A unary request gets one, with `final` set; a decoupled request any number.

    An `empty` response only marks the end of the responses. The sink owns a response, and calls `release` when the
    outputs were sent, copied, or passed on with new leases.
    """

    model_name: str
    model_version: str
    id: str
    outputs: list[Tensor] | None = None
    parameters: dict[str, ParameterValue] | None = None
    error: ServingError | None = None
    final: bool = True
    #: Whether an output has a span, and so a lease. False again after `release`.
    leased: bool = False
    #: Whether the kernel has refused the request: it was never queued, and this is its only response.
    refused: bool = False
    #: Whether it comes from the response cache: the version has not executed the request.
    cached: bool = False

    @property
    def empty(self) -> bool:
        """Whether the response has neither outputs nor an error."""
        return self.outputs is None and self.error is None

    def release(self) -> None:
        """Release the leases of the outputs. A second call does nothing."""
        if self.leased:
            self.leased = False
            for output in self.outputs or ():
                if output.span is not None:  # as `Tensor.release`, without its call
                    output.span.lease.release()


class ResponseReceiver(Protocol):
    """Receives the responses of a request. Called in the kernel's loop; never blocks, never raises."""

    def send(self, response: Response) -> None: ...


class Sink(ResponseReceiver, Protocol):
    """The end of the way of a response: what waits for it. It says who that is."""

    @property
    def peer(self) -> str:
        """The client that sent the request, as the owner of regions; empty for requests that cannot name any.

        Read only with `--shared-memory-owner=peer`, while the request is submitted. Raises `ServingError` if the client
        is not known, because it has disconnected.
        """

    def header(self, name: str) -> str:
        """Return the value of a header that came with the request, by its name in lower case; empty if it has none.

        Bytes that are not UTF-8 are surrogates. Of a header that comes twice the last counts. Read only where a model
        asks for it (`naiad.fair_by`).
        """


def peer_of_sink(sink: Sink) -> str:
    """Return who waits for a response, for the queue of helpers; empty if it is unknown or has disconnected."""
    try:
        return sink.peer
    except ServingError:
        return ""
