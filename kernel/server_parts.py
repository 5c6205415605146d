"""The parts of a server, such as its front doors, its tracer and its response cache, and their figures as data.

All parts stand in one list (`kernel/app.py`). What metrics and the page show of a part is what the part says itself: a
new part needs no attribute of the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from kernel.observe.generation_statistics import GenerationStatistics


class ServerPart(Protocol):
    """A part of the server. Each may use those before it in the list, and is closed before these.

    A part derives from this class, and overrides what it needs.
    """

    async def start(self) -> object:
        """Begin. Raises `ServingError` if the server cannot start. Only the caller knows what the result is for."""
        return None

    async def close(self) -> object:
        """End what the part does, and its processes. Follows also if `start` has failed, or was not called."""
        return None

    def figures(self) -> object | None:
        """Return what the part has done, as one of the classes of figures; None if it has no figures. Never waits."""
        return None


class DoorFigures(msgspec.Struct, frozen=True):
    """The figures of a front door that clients send requests to."""

    #: `http`, `grpc` or `openai`.
    protocol: str
    #: How many connections clients have.
    connections: int
    #: When its certificate expires, in seconds since the epoch; None without TLS, or if that is not known.
    certificate_expiry_s: float | None = None


class DoorProcessFigures(msgspec.Struct, frozen=True):
    """The figures of a front door in a process of its own."""

    #: From 1 on. The process that replaces another one has its number.
    number: int
    #: How many connections it has.
    connections: int
    #: How many requests it has submitted, with the requests of its predecessors.
    requests: int
    #: How many bytes of tensors it may have now, of the server's memory.
    granted_byte_size: int
    #: Whether it takes connections.
    ready: bool
    #: 0 from the end of a process to the start of the next one.
    pid: int = 0


class DoorProcessList(msgspec.Struct, frozen=True):
    """The figures of all front doors in processes of their own."""

    #: How many have ended and were started again.
    restarts: int = 0
    #: How many requests they have refused because there was no memory for them.
    memory_refusals: int = 0
    doors: list[DoorProcessFigures] = []


class LauncherFigures(msgspec.Struct, frozen=True):
    """The figures of a launcher that starts workers on other hosts."""

    #: `agent` or `ray`.
    launcher: str
    #: Whether it can start workers now: an agent is connected, or Ray responds.
    up: bool
    #: How many workers wait for room.
    pending: int
    #: How many workers each host has.
    workers: dict[str, int]


class GenerationFigures(DoorFigures, frozen=True):
    """The figures of a front door over which models generate text."""

    #: By name and version of the model. They go on counting; read-only.
    statistics: dict[tuple[str, str], GenerationStatistics] = {}


class TraceFigures(msgspec.Struct, frozen=True):
    """How many traces were written, and how many were lost."""

    written: int = 0
    lost: int = 0


class RecordFigures(msgspec.Struct, frozen=True):
    """How many records of the flight recorder were written, and how many were lost."""

    written: int = 0
    lost: int = 0


class RepositoryFigures(msgspec.Struct, frozen=True):
    """Whether the server can still follow its model repositories."""

    #: How much work in the background has ended by an exception that nobody expected.
    background_failures: int = 0
    #: When the repositories were last polled without a failure, in seconds since the epoch; None if never.
    polled_s: float | None = None
    #: What is wrong with the polls now, in a sentence for people; empty if nothing is.
    trouble: str = ""
