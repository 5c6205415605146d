"""What traces call the activities of front doors, and how a sink of a front door is known.

The names are Triton's (`http_server.cc`, `grpc/infer_handler.cc`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import msgspec

from kernel.loop.iteration_end import IterationEnd

if TYPE_CHECKING:
    from kernel.serving.response import Sink


class FrontDoorNames(msgspec.Struct, frozen=True, gc=False):
    """Triton's names of what a front door does."""

    #: The protocol, as recordings name it.
    protocol: str
    #: Its place in `FRONT_DOOR_NAMES`.
    place: int
    receive_start: str
    receive_end: str
    send_start: str
    send_end: str


HTTP = FrontDoorNames("http", 0, "HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")
GRPC = FrontDoorNames("grpc", 1, "GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")
FRONT_DOOR_NAMES = (HTTP, GRPC)

#: Calls what it is given once, when the response that was given to the front door before is written to its socket, or
#: nobody will write it.
WhenSent = Callable[[Callable[[], None]], object]

#: How a front door has received a request: its names; when the request began and ended to come, in monotonic
#: nanoseconds, 0 where it took no time; how to know when a response is sent, None where that is before `send` returns.
Reception = tuple[FrontDoorNames, int, int, WhenSent | None]


def at_iteration_end(callback: Callable[[], None]) -> None:
    """The `WhenSent` of front doors that write at the end of the event-loop iteration, from a task of theirs."""
    IterationEnd.current().add_send(callback)


@runtime_checkable
class FrontDoorSink(Protocol):
    """A sink whose client is at a front door."""

    def reception(self) -> Reception:
        """Return how the request was received. Asked when the request has a response."""


@functools.cache
def _is_front_door(kind: type[Sink]) -> bool:
    return issubclass(kind, FrontDoorSink)


def front_door_of(sink: Sink) -> FrontDoorSink | None:
    """Return `sink` if it is a front door's; None for a request that no client has sent."""
    return cast("FrontDoorSink", sink) if _is_front_door(type(sink)) else None
