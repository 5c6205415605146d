"""When memory that a transport was given to write may be used again: as soon as nothing is left to write.

A response may refer to memory of a worker. The transport keeps what the socket has not taken, and says only whether
it keeps anything at all; so callbacks wait until it keeps nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable

#: asyncio's own transports never call `pause_writing` in `writelines` of these versions (CVE-2024-12254).
_WRITELINES_NEVER_PAUSE = (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)


class WrittenReleases:
    """The releases of one connection. Its protocol calls `run` in `resume_writing` and in `connection_lost`."""

    __slots__ = ("_releases", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        """Make `transport` call `pause_writing` whenever anything is left to write, and `resume_writing` after it."""
        self._transport = transport
        self._releases: list[Callable[[], None]] = []
        # Transports with TLS pause when the limit is reached, others when it is exceeded.
        encrypted = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(1 if encrypted else 0)
        if _WRITELINES_NEVER_PAUSE and not encrypted and type(transport).__module__.startswith("asyncio."):
            pause_in_writelines(transport)

    def add(self, releases: Collection[Callable[[], None]]) -> None:
        """Call `releases` when all that the transport was given so far is written: at once if it is."""
        if not releases and not self._releases:
            return
        if self._transport.get_write_buffer_size():
            self._releases += releases
            return
        if self._releases:
            self.run()
        for release in releases:
            release()

    def run(self) -> None:
        """Call what is due: nothing is left to write, or the connection is lost."""
        releases, self._releases = self._releases, []
        for release in releases:
            release()


def pause_in_writelines(transport: Any) -> None:
    """Replace `writelines` of one transport of asyncio by a method that pauses the protocol if anything is left."""
    writelines = transport.writelines

    def write_and_pause(parts: Iterable[Any]) -> None:
        writelines(parts)
        if transport.get_write_buffer_size():
            transport.set_write_buffer_limits(0)  # compares the limit with what is left

    transport.writelines = write_and_pause
