"""What the composition root needs of a front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.server_parts import ServerPart
from kernel.serving.interface import KernelInterface

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from kernel.options import ServerOptions
    from kernel.serving.route import ModelRoute
    from protocols.access import KeyReader, OpenPort


class FrontDoor(ServerPart, Protocol):
    """A server on one bound socket, a part of the whole one. Made with the socket; listens from `start` on."""

    @property
    def title(self) -> str:
        """Name and address for the log, such as `HTTPService at 0.0.0.0:8000`. Asked before and after `start`."""

    @property
    def administration(self) -> OpenPort | None:
        """Who may administer the server over this front door; None if nobody can."""

    async def start(self) -> None:
        """Listen."""

    async def stop(self, grace_s: float) -> None:
        """Accept no new connections, wait at most `grace_s` seconds for running requests, and close."""

    async def close(self) -> None:
        """As `stop`, without waiting. The door may have stopped already."""
        await self.stop(0)


class DoorKernelInterface(KernelInterface, Protocol):
    """The server for a front door in a process of its own, which serves inference only. Nothing here waits."""

    def has_room_for(self, route: ModelRoute, byte_size: int) -> bool:
        """Whether there is room for a message of `byte_size` bytes. Asks for more memory when it gets short."""

    def knows(self, name: str, version: str) -> bool:
        """Whether the door can serve requests for this model, as far as the kernel has said."""

    def on_route_reply(self, name: str, version: str, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the kernel has said what a route is, for which a call of `route` has asked."""

    def open_calls(self, address: object, identity: str) -> socket.socket:
        """Return a connection over which the kernel's process takes calls of one client. Raises `OSError`."""

    def give_back(self, transport: asyncio.Transport, received: bytes, passes: int) -> bool:
        """Let the kernel's process serve a connection from now on, as `DoorProcesses.give` does the other way."""


class DoorProcesses(Protocol):
    """The front doors in processes of their own, for the front door of their protocol in the kernel's process."""

    def open(
        self,
        module: str,
        settings: bytes,
        take_back: Callable[[socket.socket, bytes, int], None] | None,
        take_calls: Callable[[socket.socket, str | tuple[str | int, ...], str], None] | None = None,
    ) -> None:
        """Start them. They run `open_connections` of `module` with `settings`.

        `take_back` gets connections that come back: the socket, what was received, and how often a door has got it.
        `take_calls` gets connections over which doors pass on calls of one client each: the socket, and the client's
        address and identity.
        """

    @property
    def available(self) -> bool:
        """Whether a door takes connections."""

    def serves(self, name: str, version: str) -> bool:
        """Whether doors serve calls with one response for this model, with the version as clients give it."""

    def give(self, transport: asyncio.Transport, received: bytes, passes: int) -> bool:
        """Give the connection of `transport` to a door; then the transport is aborted, and the connection lives on.

        `received` has come and belongs to no message that was begun. `passes` is how often a door has got it, this time
        included. Returns False if there is no door, or no descriptor: then nothing has changed.
        """

    @property
    def connection_count(self) -> int:
        """How many connections doors have."""

    async def drain(self, grace_s: float) -> None:
        """Give doors no more connections, and end each when its requests have responses, or after `grace_s` seconds."""


class DoorParts(msgspec.Struct, frozen=True):
    """What a front door is made of. The module of a front door has `make_door(parts)`, which returns it."""

    kernel: KernelInterface
    #: Bound, and the front door's from its `start` on.
    sock: socket.socket
    options: ServerOptions
    #: Reads the keys of restrictions.
    keys: KeyReader
    #: Front doors in processes of their own, for this protocol; None for none.
    processes: DoorProcesses | None = None
