"""Clients that have gone while nothing is read from their connections.

An event loop notices the end of a connection when it reads from it. Where it does not read, because the client has sent
more than the server takes at once, requests of a client that has gone would be executed for nobody.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable


def abort_gone(transports: Iterable[asyncio.Transport]) -> None:
    """Abort those of `transports` whose client has gone, or sends no more: a connection that is read ends then, too.

    One system call for all of them, which takes less than 1 µs for each.
    """
    found = {}
    poll = select.poll()
    for transport in transports:
        sock = transport.get_extra_info("socket")
        if sock is not None and (fd := sock.fileno()) >= 0:
            found[fd] = transport
            poll.register(fd, select.POLLRDHUP)  # and, as always, POLLHUP and POLLERR
    for fd, _ in poll.poll(0) if found else ():
        found[fd].abort()
