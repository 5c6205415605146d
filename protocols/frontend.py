"""What the composition root needs of a front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.server_parts import ServerPart

if TYPE_CHECKING:
    import socket

    from kernel.options import ServerOptions
    from kernel.serving.interface import KernelInterface
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


class DoorParts(msgspec.Struct, frozen=True):
    """What a front door is made of. The module of a front door has `make_door(parts)`, which returns it."""

    kernel: KernelInterface
    #: Bound, and the front door's from its `start` on.
    sock: socket.socket
    options: ServerOptions
    #: Reads the keys of restrictions.
    keys: KeyReader
