"""What a replay sends requests to. The front doors' packages have the clients, one for each protocol. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from kernel.records.recording_format import RequestRecord


class ReplayFailed(Exception):
    """A request could not be sent, or its response could not be read. The message is one line."""


class TargetLost(ReplayFailed):
    """The connection to the target failed."""


class ReplayedOutput(msgspec.Struct, frozen=True):
    """An output of a response, with its bytes in the form of the protocols."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes


class ReplayedResponse(msgspec.Struct, frozen=True):
    """A response of the target: outputs or an error."""

    outputs: list[ReplayedOutput] = []
    error: str = ""


class ReplayTarget(Protocol):
    """A server that gets the requests of a recording."""

    #: Whether models may send any number of responses.
    takes_decoupled: bool

    async def check(self) -> None:
        """Raise `ReplayFailed` if the server is not there."""

    async def serves(self, model: str) -> bool:
        """Return whether any version of a model is ready. Raises `ReplayFailed`."""

    async def send(self, request: RequestRecord) -> list[ReplayedResponse]:
        """Send a request whose inputs have their bytes, and return all responses. Raises `ReplayFailed`."""

    async def close(self) -> None:
        """Close the connections."""


def infer_parameters(request: RequestRecord) -> dict[str, str | int | bool | float]:
    """Return the parameters that a request has in both protocols: its own, and what else they have as parameters."""
    found = dict(request.parameters)
    if request.sequence_id:
        found["sequence_id"] = request.sequence_id
        found["sequence_start"] = request.sequence_start
        found["sequence_end"] = request.sequence_end
    if request.priority:
        found["priority"] = request.priority
    if request.timeout_us:
        found["timeout"] = request.timeout_us
    return found
