"""What the composition root needs of a front door."""

from __future__ import annotations

import ipaddress
from typing import Protocol


class FrontDoor(Protocol):
    """A server on one bound socket. Made with the socket and the kernel; listens from `start` on."""

    @property
    def title(self) -> str:
        """Name and address for the start-up lines, such as `HTTPService at 0.0.0.0:8000`."""

    async def start(self) -> None:
        """Listen."""

    async def stop(self, grace_s: float) -> None:
        """Accept no new connections, wait at most `grace_s` seconds for running requests, and close."""


def is_local(peer: object) -> bool:
    """Whether a peer address (as `transport.get_extra_info('peername')` gives it) is on this machine.

    Loopback addresses and Unix sockets are. An address of an unknown kind is not.
    """
    if isinstance(peer, (str, bytes)):
        return True  # a Unix socket
    if not isinstance(peer, tuple) or not peer:
        return False
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
